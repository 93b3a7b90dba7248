"""Renewal of contexts: recomputes evicted KV, so that the next prompts find it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from sgl_ext.chunks.contexts import Context
from sgl_ext.errors import ExtError

logger = logging.getLogger(__name__)


class Renewal:
    """Renewal of one server's contexts. Only its event loop calls it.

    The contexts of a prompt are renewed if KV of any of them was missing. The first miss after a
    renewal does not renew a context that no prompt has found in between: where contexts evict each
    other, renewing all of them after every miss would double the work. Pinned contexts are renewed
    after every miss.

    Args:
        compute: computes the KV of a context into the radix tree, unless it is there.
        known: returns whether a context still exists.
    """

    def __init__(
        self, compute: Callable[[Context], Awaitable[object]], known: Callable[[Context], bool]
    ) -> None:
        self._compute = compute
        self._known = known
        self._waiting: dict[str, Context] = {}
        self._unused: dict[str, Context] = {}
        """Renewed contexts that no prompt has found since then, by id."""
        self._task: asyncio.Task[None] | None = None

    def answered(self, contexts: Sequence[Context], *, missing: bool) -> None:
        """Records the answer to a prompt that names ``contexts``, and starts renewals after a miss.

        Args:
            missing: whether KV of any of the contexts was missing.
        """
        if not missing:
            for context in contexts:
                self._unused.pop(context.id, None)
            return
        for context in contexts:
            unused = self._unused.pop(context.id, None) is not None
            if context.pinned or not unused:
                self.renew(context)

    def renew(self, context: Context) -> None:
        """Computes the KV of a context in the background, unless it is there."""
        self._waiting[context.id] = context
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while self._waiting:  # one at a time, so that users' requests run in between
            context = self._waiting.pop(next(iter(self._waiting)))
            if not self._known(context):
                continue
            try:
                await self._compute(context)
            except ExtError as error:
                logger.warning("sgl_ext: context %s was not renewed: %s", context.id, error)
                continue
            self._unused[context.id] = context
        self._unused = {id_: each for id_, each in self._unused.items() if self._known(each)}
