"""A time limit on matching ``stop_regex``.

SGLang matches a client's regular expressions in its scheduler after every token. One that
backtracks, such as ``([a-z ]+)+Z``, takes time exponential in the length of the answer, during
which nobody is served. A request whose patterns take longer than the limit is ended with an error.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import torch

from sgl_ext import runtime
from sgl_ext.engine import hooks

LIMIT_S = 0.25
"""Longest that the patterns of one request are matched after one token, in seconds."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the main thread. Python's ``re`` looks for signals as it matches."""

    def passed(_signal: int, _frame: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, passed)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        # If the signal comes just here the timer has ended by itself; SGLang uses none.
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _check(original: Callable[..., bool], req: Any, *args: Any, **kw: Any) -> bool:
    patterns = req.sampling_params.stop_regex_strs
    if runtime.current is None or not patterns:
        return original(req, *args, **kw)
    from sglang.srt.runtime_context import get_parallel

    if get_parallel().pp_size > 1:  # whose stages do not take their steps together
        return original(req, *args, **kw)
    ended = late = False
    try:
        with _time_limit(LIMIT_S):
            ended = original(req, *args, **kw)
    except TimeoutError:
        late = True
    if _on_any_rank(late):
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        req.finished_len = None
        req.finished_reason = FINISH_ABORT(
            f"matching stop_regex {patterns!r:.300} against the answer took longer than "
            f"{LIMIT_S} s; give a pattern that does not repeat what repeats",
            HTTPStatus.BAD_REQUEST,
            "BadRequestError",
        )
        return True
    return ended


def _on_any_rank(late: bool) -> bool:
    """Whether it was late on one of the tensor-parallel ranks, each of which matches by itself: a
    request has to end on all of them in the same step."""
    from sglang.srt.runtime_context import get_parallel

    if get_parallel().tp_size == 1:
        return late
    from sglang.srt.distributed import get_tp_group

    found = torch.tensor([late], dtype=torch.int32)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, get_tp_group().cpu_group)
    return bool(found)


HOOKS = (
    hooks.Hook(
        "sglang.srt.managers.schedule_batch.Req._check_str_based_finish",
        "around",
        _check,
        "SGLang matches regular expressions of clients without a limit",
    ),
)
