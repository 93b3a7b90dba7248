"""Fuzz test of a server with malformed requests, while another client sends valid ones."""

from __future__ import annotations

import random
import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import requests
from fuzz_kit import rounds
from malformed_kit import LETHAL, Asked, malformed

from sgl_ext.serving.server import Server

_CI, _MOST = 200, 2000
_AT_ONCE = 4
_PATIENCE_S = 30.0
"""Timeout of a malformed request, in seconds; one that is valid by chance may ask for thousands of
tokens."""
_LEAK = re.compile(r"Traceback|site-packages|\.py\b|, line \d+")
_ASKED = {
    "input_ids": [504, 3575, 282, 4649, 314],
    "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
}


def bombard(server: Server, seed: str) -> Counter[int]:
    """Asserts that no request ends the server, leaks internals or changes another client's answer.

    Returns:
        Number of malformed requests with each status; status 0 counts requests that timed out or
        whose answer broke off.
    """
    count = min(rounds(_CI), _MOST)
    begin = server.log.stat().st_size
    expected = _answer(server)
    for asked in LETHAL:
        assert _send(server, asked) == 400, asked
    done, answers = threading.Event(), list[list[int]]()

    def others() -> None:
        while not done.is_set():
            answers.append(_answer(server))
            done.wait(0.2)

    with ThreadPoolExecutor(_AT_ONCE + 1) as threads:
        other = threads.submit(others)
        try:
            choices = (random.Random(f"{seed} {at}") for at in range(count))  # noqa: S311
            statuses = Counter(threads.map(lambda rng: _send(server, malformed(rng)), choices))
        finally:
            done.set()
        other.result()
    assert answers
    assert all(answer == expected for answer in answers)
    with server.log.open("rb") as log:
        log.seek(begin)
        said = log.read().decode(errors="replace")
    assert "Traceback" not in said, said[max(said.index("Traceback") - 500, 0) :][:4000]
    assert sum(statuses.values()) == count
    return statuses


def _answer(server: Server) -> list[int]:
    found = requests.post(f"{server.url}/generate", json=_ASKED, timeout=10 * _PATIENCE_S).json()
    ids: list[int] = found["output_ids"]
    return ids


def _send(server: Server, asked: Asked) -> int:
    try:
        answer = requests.request(
            asked.method,
            server.url + asked.path,
            data=asked.body,
            headers=dict(asked.headers),
            timeout=_PATIENCE_S,
        )
    except (requests.Timeout, requests.exceptions.ChunkedEncodingError):
        return 0  # a stream that was refused after its first bytes ends early
    said = f"{asked.method} {asked.path} {asked.body[:1000]!r}: {answer.status_code} {answer.text}"
    assert answer.status_code < 500, said[:2000]
    assert answer.ok or not _LEAK.search(answer.text), said[:2000]
    return answer.status_code
