"""Streams an answer token by token through the OpenAI client.

./scripts/serve.sh            # in another terminal
.venv/bin/python examples/stream.py
"""

import argparse

from openai import OpenAI

parser = argparse.ArgumentParser()
parser.add_argument("--url", default="http://127.0.0.1:30000")
client = OpenAI(base_url=parser.parse_args().url + "/v1", api_key="unused")

stream = client.chat.completions.create(
    model="default",
    messages=[{"role": "user", "content": "Name three colours of the rainbow."}],
    temperature=0,
    max_tokens=48,
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
