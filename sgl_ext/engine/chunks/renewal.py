"""Computes the KV of contexts again that had to go, so that their next prompts find it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from sgl_ext.chunks.contexts import Context
from sgl_ext.errors import ExtError

logger = logging.getLogger(__name__)


class Renewal:
    """Of one server's contexts; its event loop calls.

    A context is renewed when a prompt has missed it, but not if nobody has found it since it was
    renewed last: where contexts drive each other out, renewing each of them every time would
    double the work.

    Args:
        compute: puts a context's KV into the tree, or finds it there.
        known: whether a context is still one.
    """

    def __init__(
        self, compute: Callable[[Context], Awaitable[object]], known: Callable[[Context], bool]
    ) -> None:
        self._compute = compute
        self._known = known
        self._waiting: dict[str, Context] = {}
        self._unused: dict[str, Context] = {}
        """Renewed, and not found by any prompt since."""
        self._task: asyncio.Task[None] | None = None

    def answered(self, contexts: Sequence[Context], *, missing: bool) -> None:
        """A prompt has been answered that names ``contexts``.

        Args:
            missing: whether there was no KV of some of them.
        """
        if not missing:
            for context in contexts:
                self._unused.pop(context.id, None)
            return
        for context in contexts:
            if self._unused.pop(context.id, None) is None:
                self._waiting[context.id] = context
        if self._waiting and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while self._waiting:  # one after the other: users' requests come in between
            context = self._waiting.pop(next(iter(self._waiting)))
            if not self._known(context):
                continue
            try:
                await self._compute(context)
            except ExtError as error:
                logger.warning("sgl_ext: %s is not renewed: %s", context.id, error)
                continue
            self._unused[context.id] = context
        self._unused = {id_: each for id_, each in self._unused.items() if self._known(each)}
