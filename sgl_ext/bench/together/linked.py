"""TTFT of linked prompts whose chunks lie on an SSD only, with restoration and staged.

The SSD is slowed down to the speed of computing. *Staged*, a prompt waits until its chunks are in
host memory, and is then linked. With ``restore``, a part may be computed while the rest loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

from sgl_ext.bench.chunks.linked import DEFAULT, Contexts, Ids, asked, text_of
from sgl_ext.bench.chunks.prompts import Prompt, Template, question_prompts
from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.bench.harness.sampling import interleaved, ratio_of_medians
from sgl_ext.bench.together.mixed import measured
from sgl_ext.bench.together.systems import Memory, extended
from sgl_ext.models import SMOLLM2, prepare
from sgl_ext.serving import server
from sgl_ext.serving.http import forget, live, wait_until_stored
from sgl_ext.serving.server import System

RESTORED, STAGED = "restore", "staged"
_POOL = 16_384
_LENGTH = 4096
_WAIT_S = 600.0


def report_linked(report: Report, out: Path, *, quick: bool) -> None:
    """Adds the TTFTs of both systems and their ratio."""
    model, count, rounds = prepare(SMOLLM2), 2 if quick else 8, 2 if quick else 4
    template = Template.of_model(model)
    prompts = question_prompts(template, asked("hotpotqa"), count, length=_LENGTH)
    logs = out / "logs" / "linked"
    _, memory = measured(model, logs, Memory(_POOL, _POOL), _LENGTH)
    with TemporaryDirectory(dir=out, prefix="linked-") as scratch:

        def system(name: str, more: Mapping[str, Any]) -> System:
            ssd = {
                "directories": [mkdtemp(dir=scratch)],
                "capacity": "4GiB",
                "keep_after": 1,
                "emulate": {"bytes_per_second": memory.rate},
            }
            tiers = {"ssd": ssd, "staging": "512MiB", "wait": _WAIT_S}
            return extended(name, memory.arguments, {"tiers": tiers, "chunks": {}, **more})

        systems = [system(RESTORED, {"restore": {}}), system(STAGED, {})]
        with server.serve(systems, model, logs) as servers:
            ids = [_created(one.url, template, prompts) for one in servers]
            samplers = [
                lambda number, url=one.url, ids=created: _ttft(
                    url, template.reordered(prompts[number % count], seed=number), ids
                )
                for one, created in zip(servers, ids, strict=True)
            ]
            found = interleaved(samplers, 1 + count * rounds, "linked prompts")
            loaded = [live(one.url)["tiers"]["ssd"]["loaded_bytes"] for one in servers]
    ttft = {one.name: [*each[1:]] for one, each in zip(systems, found, strict=True)}
    for (name, each), bytes_ in zip(ttft.items(), loaded, strict=True):
        report.runs.append(
            {
                "what": "linked_from_ssd",
                "system": name,
                "tokens": _LENGTH,
                "samples": len(each),
                "emulated_ssd_bytes_per_s": memory.rate,
                "ssd_loaded_bytes": bytes_,
            }
            | summary(each, "ttft_ms", 1e3)
        )
    report.figures["linked_from_ssd_ttft_ratio_vs_staged"] = ratio_of_medians(
        ttft[RESTORED], ttft[STAGED]
    )


def _created(url: str, template: Template, prompts: list[Prompt]) -> Mapping[str, Ids]:
    contexts = Contexts(url, template)
    found = {prompt.name: contexts.create(prompt, DEFAULT) for prompt in prompts}
    wait_until_stored(url)
    return found


def _ttft(url: str, prompt: Prompt, ids: Mapping[str, Ids]) -> float:
    """Returns the TTFT of a prompt whose chunks only the SSD has, in seconds."""
    from sgl_ext.bench.harness.load_generator import Request, run

    forget(url)
    (timing,) = run(url, [Request(text_of(prompt, ids[prompt.name]), 1)])
    wait_until_stored(url)  # stores would slow down the next loads
    return timing.ttft
