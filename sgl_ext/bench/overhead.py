"""Benchmark of the overhead of the extension with every section off, against stock SGLang.

Both systems use the same platform and attention. Two processes of one system differ by a few
percent throughout their lifetime, because their memory lies at different places. Two processes
therefore serve each system, and their samples are pooled. Each round sends one ShareGPT prompt,
truncated to a fixed number of tokens, to all processes in turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from sgl_ext.bench.data.texts import sharegpt_prompts
from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.bench.harness.sampling import interleaved, ratio_of_medians
from sgl_ext.errors import ExtError
from sgl_ext.models import SMOLLM2, prepare
from sgl_ext.serving import server

_PROMPT_TOKENS = 96
_OUTPUT_TOKENS = 24
_WARM_UP = 3
_PROCESSES = 2
"""Number of servers of each system."""


def run(*, quick: bool, out: Path) -> Report:
    # A first token takes a tenth of the time of an answer here and varies more: more rounds.
    first_rounds, answer_rounds = (40, 6) if quick else (400, 100)
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


def measure(
    report: Report,
    flags: Mapping[str, Sequence[Sequence[str]]],
    first_rounds: int,
    answer_rounds: int,
    logs: Path,
    prefix: str = "",
) -> None:
    """Adds TTFT and TPOT of two systems, and the figures ``ttft_ratio`` and ``tpot_ratio``.

    Args:
        flags: SGLang's arguments of each process of each system, as many of both; the ratios are
            those of the second system to the first.
        first_rounds: number of prompts whose first token is timed.
        answer_rounds: number of prompts whose whole answer is timed.
        prefix: beginning of the figures' names.
    """
    from sgl_ext.bench.harness.load_generator import Request, Timing
    from sgl_ext.bench.harness.load_generator import run as send

    model = prepare(SMOLLM2)
    prompts = iter(_prompts(model, _WARM_UP + first_rounds + answer_rounds))
    systems, names = [], []
    for number, together in enumerate(zip(*flags.values(), strict=True)):
        for name, arguments in zip(flags, together, strict=True):
            systems.append(server.System(f"{name}-{number}", arguments))
            names.append(name)
    with server.serve(systems, model, logs) as servers:

        def samples(what: str, rounds: int, output_tokens: int) -> dict[str, list[Timing]]:
            """Returns the timings of each system, pooled over its processes."""
            requests = [Request(next(prompts), output_tokens) for _ in range(rounds)]
            samplers = [
                lambda n, url=running.url: send(url, [requests[n]])[0] for running in servers
            ]
            pooled: dict[str, list[Timing]] = {name: [] for name in flags}
            for name, timings in zip(names, interleaved(samplers, rounds, what), strict=True):
                pooled[name] += timings
            return pooled

        samples("warm-up", _WARM_UP, _OUTPUT_TOKENS)
        firsts = samples("first tokens", first_rounds, 1)
        answers = samples("answers", answer_rounds, _OUTPUT_TOKENS)
    ttft = {name: [timing.ttft for timing in timings] for name, timings in firsts.items()}
    tpot = {name: [timing.tpot for timing in timings] for name, timings in answers.items()}
    for name in flags:
        report.runs.append(
            {"what": f"{prefix}overhead".replace("_", " "), "system": name}
            | summary(ttft[name], "ttft_ms", 1e3)
            | summary(tpot[name], "tpot_ms", 1e3)
        )
    stock, ours = flags
    for figure, times in (("ttft_ratio", ttft), ("tpot_ratio", tpot)):
        report.figures[f"{prefix}{figure}"] = ratio_of_medians(times[ours], times[stock])


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
