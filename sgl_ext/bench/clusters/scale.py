"""Time per token of stored contexts on more devices, and with larger entries.

Devices of the part ``devices`` are emulated, each at the same fraction of an SSD's speed, so that
one of them is the limit of a token. The part ``entries`` serves a model that gives the answers of
the other parts with more KV heads, so that only the bytes of an entry differ.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sgl_ext.bench.clusters.against import Prompts
from sgl_ext.bench.clusters.answers import store
from sgl_ext.bench.clusters.samples import Sample, record, stored_system
from sgl_ext.bench.clusters.selections import (
    ENTRY,
    OURS,
    PAGES,
    Measured,
    arranged_all,
    measure,
    measure_all,
    served,
)
from sgl_ext.bench.clusters.serving import PM9A3_BYTES, PM9A3_OPERATIONS
from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.bench.harness.sampling import ratio, rotated
from sgl_ext.serving import server

_SHARE = 0.1
_SLOWER = 160
"""Factor by which an emulated device is slower than an SSD; two cores compute a token about as fast
as two such devices read what it selects."""
_EMULATED = {
    "bytes_per_second": int(PM9A3_BYTES / _SLOWER),
    "operations_per_second": PM9A3_OPERATIONS / _SLOWER,
}
_POOL = 16_384
_HOT_BYTES = 8 << 20
"""Memory for blocks of the part ``devices``."""
_HOT_BYTES_OF_ENTRIES = 3 << 20
"""Memory for blocks with SmolLM2's own KV heads, less than a token reads of 2,048 tokens; in
proportion to the heads with more of them."""
_OWN_KV_HEADS = 3


def report_devices(
    report: Report,
    model: Path,
    sample: Sample,
    devices: Sequence[int],
    batches: Sequence[int],
    rounds: int,
    out: Path,
) -> None:
    """Measures a context on several numbers of emulated devices; adds the figures.

    Args:
        devices: numbers of devices, each of which has a server.
        batches: numbers of requests that are sent at once.
        rounds: number of measured batches of each size.
    """
    section = {"hot": _HOT_BYTES, "largest": _SHARE, "emulate": _EMULATED}
    with tempfile.TemporaryDirectory(dir=out, prefix="clusters-") as scratch:
        systems = [
            stored_system(f"{count} devices", Path(scratch) / str(count), count, _POOL, section)
            for count in devices
        ]
        with server.serve(systems, model, out / "logs") as servers:
            stored = [
                (count, each, store(each.url, sample.context))
                for count, each in zip(devices, servers, strict=True)
            ]
            found = {(count, batch): Measured() for count in devices for batch in batches}
            prompts = Prompts(sample.unseen)
            for at in range(rounds + 1):
                for batch in batches:
                    asked = prompts.take(batch)
                    for count, each, id_ in rotated(stored, at):
                        # The first round opens the contexts and is not counted.
                        into = found[count, batch] if at else Measured()
                        measure(each.url, id_, _SHARE, asked, into)
    for (count, batch), one in found.items():
        report.runs.append(
            {"what": "devices", "devices": count, "batch": batch, "sparsity": _SHARE,
             "tokens": len(sample.context), "samples": len(one.token),
             "tokens_per_s": batch / statistics.median(one.token),
             "in_memory": statistics.median(one.in_memory)}
            | summary(one.ttft, "ttft_ms", 1e3)
            | summary(one.token, "token_ms", 1e3)
        )  # fmt: skip
        if count != devices[0]:
            report.figures[f"tokens_per_s_of_{count}_devices_b{batch}"] = ratio(
                found[devices[0], batch].token, one.token
            )


def report_entries(
    report: Report,
    model: Path,
    kv_heads: int,
    sample: Sample,
    batches: Sequence[int],
    rounds: int,
    out: Path,
) -> None:
    """Measures several arrangements with the entries of a model; adds the figures.

    Args:
        kv_heads: number of KV heads of the model, which otherwise is SmolLM2.
        batches: numbers of requests that are sent at once.
        rounds: number of measured batches of each setting.
    """
    hot = _HOT_BYTES_OF_ENTRIES * kv_heads // _OWN_KV_HEADS
    with served(model, _POOL, out, hot) as (url, directories):
        contexts = arranged_all(record(url, sample.context), directories, (PAGES, ENTRY, OURS))
        found = measure_all(url, contexts, sample, batches, rounds, (_SHARE,))
    for (_, name, batch), one in found.items():
        blocks = contexts[name].blocks
        size = blocks.entry_bytes
        report.runs.append(
            {"what": "entries", "entry_bytes": size, "system": name, "batch": batch,
             "sparsity": _SHARE, "tokens": len(sample.context), "block": blocks.block,
             "samples": len(one.token), "tokens_per_s": batch / statistics.median(one.token),
             "read_bytes": blocks.block_bytes * statistics.median(one.read)}
            | summary(one.ttft, "ttft_ms", 1e3)
            | summary(one.token, "token_ms", 1e3)
        )  # fmt: skip
        if name != OURS:
            ours = found[_SHARE, OURS, batch]
            report.figures[f"tokens_per_s_ours_to_{name}_{size}_b{batch}"] = ratio(
                one.token, ours.token
            )
