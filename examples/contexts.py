"""Documents are computed once and linked into prompts in any order.

./scripts/serve.sh --page-size 16 --ext-config '{"chunks": {}}'    # in another terminal
python examples/contexts.py
"""

import argparse
import time

from openai import OpenAI

from sgl_ext.client import ContextCache, part

DOCUMENTS = {
    "the bear": "The bear lives in a cave above the river. It sleeps from November to March. " * 20,
    "the fox": "The fox lives under the old oak. It hunts at night, mostly for mice. " * 20,
    "the owl": "The owl lives in the tower of the church. It has three children. " * 20,
}

parser = argparse.ArgumentParser()
parser.add_argument("--url", default="http://127.0.0.1:30000")
url = parser.parse_args().url
client = OpenAI(base_url=url + "/v1", api_key="unused")

contexts = ContextCache(url).create(list(DOCUMENTS.values()), ttl=600)
for name, context in zip(DOCUMENTS, contexts, strict=True):
    print(f"{name}: {context.id}, {context.tokens} tokens, {context.bytes / 1e6:.1f} MB")

for order in ((0, 1, 2), (2, 0, 1)):
    question = {"type": "text", "text": "\nWhere does the owl live? Answer in one sentence."}
    content = [*(part(contexts[number]) for number in order), question]
    messages = [{"role": "user", "content": content}]
    start = time.monotonic()
    first = client.chat.completions.create(
        model="default", messages=messages, max_tokens=1, extra_body={"return_meta_info": True}
    )
    print(f"order {order}: first token after {time.monotonic() - start:.3f} s")
    print("  what was linked:", first.choices[0].meta_info.get("ext"))
    answer = client.chat.completions.create(
        model="default", messages=messages, temperature=0, max_tokens=32
    )
    print(" ", answer.choices[0].message.content)
