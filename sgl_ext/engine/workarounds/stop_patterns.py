"""Time limit on the matching of ``stop_regex``.

SGLang matches a client's regular expressions in its scheduler after every token. A pattern that
backtracks, such as ``([a-z ]+)+Z``, takes time exponential in the length of the answer, and no
request is served meanwhile. A request whose patterns take longer than the limit is ended with an
error.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

import torch

from sgl_ext.engine.core import hooks, runtime
from sgl_ext.engine.core.hooks import Original
from sgl_ext.engine.core.sglang_types import Req, SamplingParams, ServerArgs


class Allowance:
    """Seconds that a scheduler may spend on patterns: a token bucket that fills with time.

    In the long run, matches take at most the share ``SHARE`` of the scheduler's time, plus
    ``LEAST`` seconds each, regardless of the number of requests and of their duration.
    """

    MOST, LEAST, SHARE = 0.25, 0.01, 0.1

    def __init__(self) -> None:
        self._left = self.MOST
        self._at = float("-inf")

    def given(self, now: float) -> float:
        """Returns the number of seconds that the next match may take.

        Args:
            now: time of a monotonic clock, in seconds.
        """
        self._left = min(self._left + self.SHARE * (now - self._at), self.MOST)
        self._at = now
        return max(self._left, self.LEAST)

    def took(self, seconds: float) -> None:
        """Subtracts the seconds that a match has taken."""
        self._left = max(self._left - seconds, 0.0)


_allowance = Allowance()


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the main thread after so many seconds of its CPU time.

    Python's ``re`` checks for signals while it matches.
    """
    end = time.thread_time() + seconds

    def passed(_signal: int, _frame: object) -> None:
        if (left := end - time.thread_time()) > 0:  # other threads or processes used the core
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3))
        else:
            raise TimeoutError

    before = signal.signal(signal.SIGALRM, passed)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        # If the signal arrives here, the timer has expired. SGLang uses no such timer.
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            signal.signal(signal.SIGALRM, before)


def require_served(params: SamplingParams, server_args: ServerArgs) -> None:
    """Raises ValueError if a request has patterns that pipeline stages would have to match.

    Each stage matches by itself, and stages do not run the same step together, so that they could
    not end a request that is late on one of them.
    """
    if params.stop_regex_strs and server_args.pp_size > 1:
        raise ValueError(
            "stop_regex is not served with --pp-size above 1, because the time of its matches "
            "cannot be limited there; use stop strings"
        )


def _check(original: Original, req: Req, *args: object, **kw: object) -> bool:
    patterns = req.sampling_params.stop_regex_strs
    if runtime.current is None or not patterns:
        return original(req, *args, **kw)
    if threading.current_thread() is not threading.main_thread():  # it receives no signals
        return original(req, *args, **kw)
    ended = late = False
    began = time.thread_time()
    try:
        with _time_limit(_allowance.given(time.monotonic())):
            ended = original(req, *args, **kw)
    except TimeoutError:
        late = True
    _allowance.took(time.thread_time() - began)
    if _on_any_rank(late):
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        req.finished_len = None
        req.finished_reason = FINISH_ABORT(
            f"compiling stop_regex {patterns!r:.300}, or matching it against the answer, takes "
            "too long; use a pattern without nested repetitions, or stop strings",
            HTTPStatus.BAD_REQUEST,
            "BadRequestError",
        )
        return True
    return ended


def _on_any_rank(late: bool) -> bool:
    """Returns whether the match was late on any tensor-parallel rank.

    Each rank matches by itself, and a request has to end on all of them in the same step.
    """
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
        "SGLang matches regular expressions of clients without a time limit",
    ),
)
