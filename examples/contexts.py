"""Documents are computed once and linked into prompts in any order.

./scripts/serve.sh --page-size 16 --ext-config '{"chunks": {}}'    # in another terminal
.venv/bin/python examples/contexts.py

In each order the question is asked twice: after the documents' text, which is computed, and after
their contexts, which are linked. Linked answers are approximate and may differ.
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
QUESTION = {"type": "text", "text": "\nWhat does the fox hunt? Answer in one sentence."}

parser = argparse.ArgumentParser()
parser.add_argument("--url", default="http://127.0.0.1:30000")
url = parser.parse_args().url
client = OpenAI(base_url=url + "/v1", api_key="unused")


def ask(parts: list[dict]) -> tuple[float, str, object]:
    """Seconds until the first token, the answer, and what the powers did for it."""
    messages = [{"role": "user", "content": [*parts, QUESTION]}]
    start = time.monotonic()
    first = client.chat.completions.create(model="default", messages=messages, max_tokens=1)
    seconds = time.monotonic() - start
    answer = client.chat.completions.create(
        model="default", messages=messages, temperature=0, max_tokens=32
    )
    return seconds, answer.choices[0].message.content, first.model_extra.get("sglext")


texts = list(DOCUMENTS.values())
contexts = ContextCache(url).create(texts, ttl=600)
for name, context in zip(DOCUMENTS, contexts, strict=True):
    print(f"{name}: {context.id}, {context.tokens} tokens, {context.bytes / 1e6:.1f} MB")

for order in ((0, 1, 2), (2, 0, 1)):
    print(f"order {order}")
    seconds, answer, _ = ask([{"type": "text", "text": texts[number]} for number in order])
    print(f"  computed: first token after {seconds:.2f} s, {answer!r}")
    seconds, answer, ext = ask([part(contexts[number]) for number in order])
    print(f"  linked:   first token after {seconds:.2f} s, {answer!r}")
    print(f"            {ext}")
