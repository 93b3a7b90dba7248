"""Benchmark of the overhead of the extension with every section off, against stock SGLang.

Both systems use the same platform and attention. Two processes of one system differ by a few
percent throughout their lifetime, because their memory lies at different places. Two processes
therefore serve each system. Each round sends one ShareGPT prompt, truncated to a fixed number of
tokens, to all processes in turn. A round's ratio is that of the systems' mean times, because what
else the machine does changes from round to round by more than the overhead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sgl_ext.bench.data.texts import sharegpt_prompts
from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.bench.harness.sampling import interleaved, paired_ratio
from sgl_ext.errors import ExtError
from sgl_ext.models import SMOLLM2, prepare
from sgl_ext.serving import server

if TYPE_CHECKING:
    from sgl_ext.bench.harness.load_generator import Timing

_PROMPT_TOKENS = 96
_OUTPUT_TOKENS = 24
_WARM_UP = 3
_PROCESSES = 2
"""Number of servers of each system."""


def run(*, quick: bool, out: Path) -> Report:
    first_rounds, answer_rounds = rounds(quick=quick)
    report = Report(
        "overhead",
        {
            "quick": quick,
            "rounds": {"ttft": first_rounds, "tpot": answer_rounds},
            "processes_per_system": _PROCESSES,
            "prompt_tokens": _PROMPT_TOKENS,
            "output_tokens": _OUTPUT_TOKENS,
        },
    )
    pool = ("--max-total-tokens", "32768")
    extension = (*pool, "--enable-ext")
    flags: dict[str, Sequence[Sequence[str]]] = {
        "stock": [pool] * _PROCESSES,
        "extension": [extension] * _PROCESSES,
    }
    measure(report, flags, first_rounds, answer_rounds, out / "logs")
    return report


def rounds(*, quick: bool) -> tuple[int, int]:
    """Returns the number of prompts for times of first tokens, and for those of whole answers.

    A first token takes a tenth of the time of an answer here and varies more: more rounds.
    """
    return (120, 20) if quick else (400, 100)


def measure(
    report: Report,
    flags: Mapping[str, Sequence[Sequence[str]]],
    first_rounds: int,
    answer_rounds: int,
    logs: Path,
    prefix: str = "",
) -> None:
    """Adds TTFT and TPOT of two systems, and the figures ``ttft_ratio`` and ``tpot_ratio``.

    The last row has the ratios' 95 % confidence intervals.

    Args:
        flags: SGLang's arguments of each process of each system, as many of both; the ratios are
            those of the second system to the first.
        first_rounds: number of prompts whose first token is timed.
        answer_rounds: number of prompts whose whole answer is timed.
        prefix: beginning of the figures' names.
    """
    from sgl_ext.bench.harness.load_generator import Request
    from sgl_ext.bench.harness.load_generator import run as send

    model = prepare(SMOLLM2)
    prompts = iter(_prompts(model, _WARM_UP + first_rounds + answer_rounds))
    systems, names = [], []
    for number, together in enumerate(zip(*flags.values(), strict=True)):
        for name, arguments in zip(flags, together, strict=True):
            systems.append(server.System(f"{name}-{number}", arguments))
            names.append(name)
    with server.serve(systems, model, logs) as servers:

        def samples(what: str, rounds: int, output_tokens: int) -> dict[str, list[list[Timing]]]:
            """Returns the timings of each system: a list of all rounds for each process."""
            requests = [Request(next(prompts), output_tokens) for _ in range(rounds)]
            samplers = [
                lambda n, url=running.url: send(url, [requests[n]])[0] for running in servers
            ]
            found: dict[str, list[list[Timing]]] = {name: [] for name in flags}
            for name, timings in zip(names, interleaved(samplers, rounds, what), strict=True):
                found[name].append(timings)
            return found

        samples("warm-up", _WARM_UP, _OUTPUT_TOKENS)
        firsts = samples("first tokens", first_rounds, 1)
        answers = samples("answers", answer_rounds, _OUTPUT_TOKENS)
    ttft = {name: _seconds(timings, "ttft") for name, timings in firsts.items()}
    tpot = {name: _seconds(timings, "tpot") for name, timings in answers.items()}
    stock, ours = flags
    what = f"{prefix}overhead".replace("_", " ")
    for name in flags:
        report.runs.append(
            {"what": what, "system": name}
            | summary(ttft[name].ravel().tolist(), "ttft_ms", 1e3)
            | summary(tpot[name].ravel().tolist(), "tpot_ms", 1e3)
        )
    intervals: dict[str, float] = {}
    for figure, times in (("ttft_ratio", ttft), ("tpot_ratio", tpot)):
        ratio = paired_ratio(times[ours].mean(0), times[stock].mean(0))
        report.figures[f"{prefix}{figure}"] = ratio.median
        intervals |= {f"{figure}_low": ratio.low, f"{figure}_high": ratio.high}
    report.runs.append({"what": what, "system": f"{ours} / {stock}"} | intervals)


def _seconds(timings: list[list[Timing]], field: str) -> NDArray[np.float64]:
    """Returns the times of shape ``(processes, rounds)``."""
    return np.array([[getattr(timing, field) for timing in process] for process in timings])


def _prompts(model: Path, count: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = sharegpt_prompts(count * 4, characters=(5 * _PROMPT_TOKENS, 20 * _PROMPT_TOKENS))
    tokenized = (tokenizer(text)["input_ids"][:_PROMPT_TOKENS] for text in texts)
    prompts = [ids for ids in tokenized if len(ids) == _PROMPT_TOKENS][:count]
    if len(prompts) < count:
        raise ExtError(
            f"expected {count} ShareGPT prompts of {_PROMPT_TOKENS} tokens, found {len(prompts)}"
        )
    return prompts
