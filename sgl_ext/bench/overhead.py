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
from sgl_ext.models import SMOLLM2, prepare

_PROMPT_TOKENS = 192
_OUTPUT_TOKENS = 24
_WARM_UP = 4


def run(*, quick: bool, out: Path) -> Report:
    rounds = 40 if quick else 300
    report = Report(
        "overhead",
        {
            "quick": quick,
            "rounds": rounds,
            "prompt_tokens": _PROMPT_TOKENS,
            "output_tokens": _OUTPUT_TOKENS,
        },
    )
    from sgl_ext.engine.load_generator import Request, Timing
    from sgl_ext.engine.load_generator import run as send

    model = prepare(SMOLLM2)
    prompts = _prompts(model, rounds + _WARM_UP)
    arguments = ("--max-total-tokens", "32768")
    systems = [
        server.System("stock", arguments),
        server.System("extension", (*arguments, "--enable-ext")),
    ]
    with server.serve(systems, model, out / "logs") as (stock, extension):

        def sample(url: str, number: int) -> Timing:
            (timing,) = send(url, [Request(prompts[number], _OUTPUT_TOKENS)])
            return timing

        interleaved(
            lambda n: sample(stock.url, rounds + n),
            lambda n: sample(extension.url, rounds + n),
            _WARM_UP,
        )
        timings = interleaved(
            lambda n: sample(stock.url, n), lambda n: sample(extension.url, n), rounds
        )
    for system, of_system in zip(systems, timings, strict=True):
        report.runs.append(
            {"system": system.name, "requests": len(of_system)}
            | summary([timing.ttft for timing in of_system], "ttft_ms", 1e3)
            | summary([timing.tpot for timing in of_system], "tpot_ms", 1e3)
        )
    for figure, of in (("ttft_ratio", lambda t: t.ttft), ("tpot_ratio", lambda t: t.tpot)):
        medians = [statistics.median(map(of, of_system)) for of_system in timings]
        report.figures[figure] = medians[1] / medians[0]
    return report


def _prompts(model: Path, count: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = sharegpt_prompts(count * 4, characters=(5 * _PROMPT_TOKENS, 20 * _PROMPT_TOKENS))
    tokenized = (tokenizer(text)["input_ids"][:_PROMPT_TOKENS] for text in texts)
    prompts = [ids for ids in tokenized if len(ids) == _PROMPT_TOKENS][:count]
    if len(prompts) < count:
        raise RuntimeError(f"ShareGPT has {len(prompts)} prompts of this length, not {count}")
    return prompts
