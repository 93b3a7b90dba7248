"""Chat through the OpenAI client.

./scripts/serve.sh            # in another terminal
.venv/bin/python examples/chat.py
"""

import argparse

from openai import OpenAI

parser = argparse.ArgumentParser()
parser.add_argument("--url", default="http://127.0.0.1:30000")
client = OpenAI(base_url=parser.parse_args().url + "/v1", api_key="unused")

messages = [{"role": "user", "content": "What is the capital of France?"}]
answer = client.chat.completions.create(
    model="default", messages=messages, temperature=0, max_tokens=32
)
print(answer.choices[0].message.content)

# The next turn repeats the conversation; the server holds its KV and computes only what is new.
messages += [answer.choices[0].message, {"role": "user", "content": "And of Italy?"}]
answer = client.chat.completions.create(
    model="default", messages=messages, temperature=0, max_tokens=32
)
print(answer.choices[0].message.content)
