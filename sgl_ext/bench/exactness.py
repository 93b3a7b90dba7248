"""Exact powers give the answers of stock SGLang: multi-turn conversations, token by token.

Conversations take turns on a device pool that holds a few of them, so that what a turn finds was
evicted in between. Every answer is compared with a server without the extension: greedy tokens,
and their logprobs, in float32.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import requests

from sgl_ext.bench import server
from sgl_ext.bench.conversations import Conversation, conversations
from sgl_ext.bench.report import Report
from sgl_ext.errors import ExtError
from sgl_ext.models import SMOLLM2, prepare

_OUTPUT_TOKENS = 8
_DEADLINE_S = 300.0


def run(*, quick: bool, out: Path) -> Report:
    model = prepare(SMOLLM2)
    held = conversations(model, 8 if quick else 200, turns=2, tokens=(250, 500 if quick else 900))
    report = Report("exactness", {"quick": quick, "conversations": len(held), "dtype": "float32"})
    out.mkdir(parents=True, exist_ok=True)
    for page in (16,) if quick else (1, 16):
        with tempfile.TemporaryDirectory(dir=out, prefix="exactness-") as scratch:
            systems = _systems(page, Path(scratch))
            with server.serve(systems, model, out / "logs") as servers:
                _compare(report, page, servers, held)
    return report


def _systems(page: int, scratch: Path) -> list[server.System]:
    pool = ("--max-total-tokens", "2048", "--page-size", str(page), "--dtype", "float32")
    ssd = {"directories": [str(scratch)], "capacity": "16GiB", "keep_after": 1}
    configs = {
        "host": {"tiers": {"host": {"capacity": "1GiB"}}},
        "ssd": {"tiers": {"ssd": ssd, "staging": "128MiB"}},
    }
    strict = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    return [
        server.System(f"stock-{page}", pool),
        *(
            server.System(
                f"{name}-{page}",
                (*pool, "--enable-ext", "--ext-config", json.dumps(config)),
                strict,
            )
            for name, config in configs.items()
        ),
    ]


def _compare(
    report: Report, page: int, servers: Sequence[server.Server], held: Sequence[Conversation]
) -> None:
    differing = {each.system.name: 0 for each in servers[1:]}
    largest = dict.fromkeys(differing, 0.0)
    hits = dict.fromkeys(differing, 0)
    for turn in range(len(held[0].prompts)):
        # Back and forth: what a small tier still has is asked for first, what it has not, last.
        for conversation in held[:: -1 if turn % 2 else 1]:
            expected, *found = (_answer(each, conversation.prompts[turn]) for each in servers)
            for name, answer in zip(differing, found, strict=True):
                differing[name] += answer["output_ids"] != expected["output_ids"]
                largest[name] = max(largest[name], _difference(answer, expected))
                details = answer["meta_info"].get("cached_tokens_details") or {}
                hits[name] += sum(count for tier, count in details.items() if tier != "device")
    for name in differing:
        report.runs.append(
            {
                "system": name,
                "answers": len(held) * len(held[0].prompts),
                "that differ": differing[name],
                "largest logprob difference": largest[name],
                "prompt tokens from tiers": hits[name],
            }
        )
    report.figures[f"differing_answers_page_{page}"] = sum(differing.values())
    report.figures[f"largest_logprob_difference_page_{page}"] = max(largest.values())
    report.figures[f"tokens_from_tiers_page_{page}"] = min(hits.values())


def _answer(running: server.Server, prompt: Sequence[int]) -> dict[str, Any]:
    body = {
        "input_ids": prompt,
        "sampling_params": {
            "temperature": 0, "max_new_tokens": _OUTPUT_TOKENS, "ignore_eos": True,
        },
        "return_logprob": True,
    }  # fmt: skip
    response = requests.post(f"{running.url}/generate", json=body, timeout=_DEADLINE_S)
    if not response.ok:
        raise ExtError(f"{running.system.name} answered {response.status_code}: {response.text}")
    answer: dict[str, Any] = response.json()
    return answer


def _difference(answer: dict[str, Any], expected: dict[str, Any]) -> float:
    pairs = zip(
        answer["meta_info"]["output_token_logprobs"],
        expected["meta_info"]["output_token_logprobs"],
        strict=True,
    )
    return max(abs(float(ours[0]) - float(theirs[0])) for ours, theirs in pairs)
