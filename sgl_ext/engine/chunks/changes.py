"""Changes of contexts that are kept in a database, or undone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from sgl_ext.chunks.contexts import Contexts
from sgl_ext.chunks.kept import KeptContexts


class KeptChanges:
    """Changes of the contexts of a server, one at a time.

    Args:
        contexts: registry of the contexts.
        kept: its keeper; None if contexts end with the server.
    """

    def __init__(self, contexts: Contexts, kept: KeptContexts | None) -> None:
        self._contexts, self._kept = contexts, kept
        self._one = asyncio.Lock()
        # A commit waits for the device.
        self._committing = ThreadPoolExecutor(1, "sgl_ext-kept-contexts")

    @asynccontextmanager
    async def change(self) -> AsyncIterator[None]:
        """Surrounds a change of the registry: keeps it in the database, or undoes all of it.

        Raises:
            ExtError: the change cannot be kept.
        """
        async with self._one:
            if self._kept is None:
                yield
                return
            try:
                yield
            except BaseException:
                self._contexts.undo(self._contexts.take_changes())
                self._kept.undo()
                raise
            changes = self._contexts.take_changes()
            loop = asyncio.get_running_loop()
            commit = loop.run_in_executor(self._committing, self._kept.commit)
            try:
                await asyncio.shield(commit)
            except BaseException:
                await asyncio.wait([commit])  # also if the request is cancelled
                if commit.exception() is not None:
                    self._contexts.undo(changes)
                raise
