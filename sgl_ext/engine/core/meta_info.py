"""Reports of the powers on a request, in ``meta_info.ext`` of its answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from sgl_ext.engine.core import hooks
from sgl_ext.engine.core.sglang_types import Req

_EXT = "ext"


class _Report(list[Mapping[str, Any]]):
    """Entries of a request, in the order in which they were told."""

    sent = 0
    """Number of them that were sent towards the client."""


class Outputs(Protocol):
    """Outputs of a step that the scheduler sends to the detokenizer."""

    output_reqs: list[Req]
    customized_info: dict[str, list[Any]]
    """Additions to ``meta_info`` by their names, one for each of the requests."""


def tell(req: Req, entry: Mapping[str, Any]) -> None:
    """Adds ``entry``, which names its ``power``, to the report in the request's answer."""
    req.customized_info = req.customized_info or {}
    req.customized_info.setdefault(_EXT, _Report()).append(entry)


def told(req: Req, power: str) -> list[Mapping[str, Any]]:
    """Returns the entries that ``power`` has added to the request's report so far."""
    return [entry for entry in (req.customized_info or {}).get(_EXT, ()) if entry["power"] == power]


def unsent(req: Req, power: str) -> list[Mapping[str, Any]]:
    """Returns the entries of ``power`` that the client has not been sent, and that may change."""
    report: _Report = (req.customized_info or {}).get(_EXT) or _Report()
    return [entry for entry in report[report.sent :] if entry["power"] == power]


def _send(outputs: Outputs, **_given: object) -> None:
    """Sends each entry once: with the next part of a stream, or with the answer of other requests.

    The receiver adds what it is sent to what it has, and shows all of it.
    """
    outputs.customized_info.pop(_EXT, None)
    entries = [_unsent(req) for req in outputs.output_reqs]
    if any(entries):
        outputs.customized_info[_EXT] = entries


def _unsent(req: Req) -> list[Mapping[str, Any]]:
    report: _Report | None = (req.customized_info or {}).get(_EXT)
    if report is None or not (req.stream or req.finished()):
        return []
    first, report.sent = report.sent, len(report)
    return report[first:]


HOOKS = (
    hooks.Hook(
        "sglang.srt.managers.scheduler_components.output_streamer."
        "_GenerationStreamAccumulator.to_payload",
        "before",
        _send,
        "SGLang sends what a request adds to its meta_info as one value per token, or, if a "
        "subclass of the streamer, which the scheduler chooses itself, says so, with the first "
        "token of a stream",
    ),
)
