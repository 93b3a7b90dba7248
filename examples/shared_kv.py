"""Two servers share their KV through a Mooncake store: what one has computed, the other loads.

Each command needs a terminal of its own::

    ./scripts/mooncake.sh
    ./scripts/serve.sh --page-size 16 --port 30000 --sleep-on-idle \\
        --ext-config '{"tiers": {"remote": {"master": "127.0.0.1:50051"}}}'
    ./scripts/serve.sh --page-size 16 --port 30001 --sleep-on-idle \\
        --ext-config '{"tiers": {"remote": {"master": "127.0.0.1:50051"}}}'
    .venv/bin/python examples/shared_kv.py
"""

import time

import requests

URLS = "http://127.0.0.1:30000", "http://127.0.0.1:30001"
text = "A long document. " + "The bear met the fox at the river and they talked until night. " * 60

for url in URLS:
    body = {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    start = time.monotonic()
    answer = requests.post(f"{url}/generate", json=body, timeout=300).json()
    meta = answer["meta_info"]
    print(f"{url}: {answer['text']!r} in {time.monotonic() - start:.2f} s")
    print(f"  of {meta['prompt_tokens']} tokens: {meta.get('cached_tokens_details')}")
    time.sleep(2)  # pages are written to the store asynchronously, after the response
