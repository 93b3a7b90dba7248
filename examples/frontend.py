"""An SGLang frontend program: the forks share the KV of what comes before them.

./scripts/serve.sh            # in another terminal
.venv/bin/python examples/frontend.py
"""

import argparse

import sglang as sgl


@sgl.function
def compare(s, city: str) -> None:
    s += sgl.user(f"Tell me about {city}. What country is it in, and which river runs through it?")
    branches = s.fork(2)
    for branch, start in zip(branches, ("The country is", "The river is"), strict=True):
        branch += sgl.assistant(start + sgl.gen("rest", max_tokens=12, temperature=0, stop="."))
    branches.join()
    s["country"], s["river"] = (branch["rest"].strip() for branch in branches)


parser = argparse.ArgumentParser()
parser.add_argument("--url", default="http://127.0.0.1:30000")
sgl.set_default_backend(sgl.RuntimeEndpoint(parser.parse_args().url))

state = compare.run(city="Paris")
print("country:", state["country"])
print("river:", state["river"])
