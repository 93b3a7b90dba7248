"""Stock SGLang against the extension with every section off: it must cost nothing.

Both run on the same platform and attention. Each round sends one ShareGPT prompt, cut to the same
number of tokens, to both systems in turn.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from sgl_ext.bench import server
from sgl_ext.bench.data import sharegpt_prompts
from sgl_ext.bench.report import Report, summary
from sgl_ext.bench.sampling import interleaved
from sgl_ext.errors import ExtError
from sgl_ext.models import SMOLLM2, prepare

_PROMPT_TOKENS = 192
_OUTPUT_TOKENS = 24
_WARM_UP = 4


def run(*, quick: bool, out: Path) -> Report:
    # A first token costs a fifth of a whole answer here and varies more: it gets more rounds.
    first_rounds, answer_rounds = (120, 24) if quick else (400, 200)
    report = Report(
        "overhead",
        {
            "quick": quick,
            "rounds": {"ttft": first_rounds, "tpot": answer_rounds},
            "prompt_tokens": _PROMPT_TOKENS,
            "output_tokens": _OUTPUT_TOKENS,
        },
    )
    from sgl_ext.engine.load_generator import Request, Timing
    from sgl_ext.engine.load_generator import run as send

    model = prepare(SMOLLM2)
    prompts = iter(_prompts(model, _WARM_UP + first_rounds + answer_rounds))
    arguments = ("--max-total-tokens", "32768")
    systems = [
        server.System("stock", arguments),
        server.System("extension", (*arguments, "--enable-ext")),
    ]
    with server.serve(systems, model, out / "logs") as servers:

        def samples(rounds: int, output_tokens: int) -> tuple[list[Timing], list[Timing]]:
            requests = [Request(next(prompts), output_tokens) for _ in range(rounds)]
            return interleaved(
                lambda n: send(servers[0].url, [requests[n]])[0],
                lambda n: send(servers[1].url, [requests[n]])[0],
                rounds,
            )

        samples(_WARM_UP, _OUTPUT_TOKENS)
        firsts = samples(first_rounds, 1)
        answers = samples(answer_rounds, _OUTPUT_TOKENS)
    ttft = [[timing.ttft for timing in of_system] for of_system in firsts]
    tpot = [[timing.tpot for timing in of_system] for of_system in answers]
    for index, system in enumerate(systems):
        report.runs.append(
            {"system": system.name}
            | summary(ttft[index], "ttft_ms", 1e3)
            | summary(tpot[index], "tpot_ms", 1e3)
        )
    for figure, times in (("ttft_ratio", ttft), ("tpot_ratio", tpot)):
        report.figures[figure] = statistics.median(times[1]) / statistics.median(times[0])
    return report


def _prompts(model: Path, count: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = sharegpt_prompts(count * 4, characters=(5 * _PROMPT_TOKENS, 20 * _PROMPT_TOKENS))
    tokenized = (tokenizer(text)["input_ids"][:_PROMPT_TOKENS] for text in texts)
    prompts = [ids for ids in tokenized if len(ids) == _PROMPT_TOKENS][:count]
    if len(prompts) < count:
        raise ExtError(f"ShareGPT has {len(prompts)} prompts of this length, not {count}")
    return prompts
