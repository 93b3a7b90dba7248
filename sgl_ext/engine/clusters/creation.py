"""Creation of stored contexts in SGLang's tokenizer process: computes, profiles, stores them."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import xxhash

from sgl_ext.clusters.about import About
from sgl_ext.clusters.files import FULL, remove, remove_blocks, remove_indexes, storing
from sgl_ext.clusters.paths import PART, new_id, record_folder
from sgl_ext.clusters.records import claimed, remove_record
from sgl_ext.clusters.stored import about_of, require_files, require_no_loss
from sgl_ext.engine.clusters.limits import Limits
from sgl_ext.engine.clusters.recording import ROOM, Recording, part_size
from sgl_ext.engine.core.own_requests import AbortedError, OwnRequests
from sgl_ext.engine.core.sglang_types import TokenizerManager
from sgl_ext.errors import ExtError, reason_of

_DEADLINE_S = 3600.0
"""Longest time without progress of a context that is being stored or is queued, in seconds."""
_AT_ONCE = 8
"""Maximum number of contexts that are being stored or are queued."""
_KILLED_BY = {signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM}
"""Signals that end a process from outside. Others are its own errors, which would come again."""
_LAYERS = re.compile(r"\d+/\d+")
_SAYS = "sgl_ext: "
"""Prefix of the error line that the storing process (:mod:`sgl_ext.clusters.job`) prints."""

logger = logging.getLogger(__name__)

T = TypeVar("T")


class _KilledError(ExtError):
    """Error for a context whose storing process was killed, for example because the server ends."""


class BusyError(ExtError):
    """Error for a context that cannot be stored because too many others are queued."""

    status = 429


_INTERRUPTED = (
    TimeoutError, asyncio.CancelledError, GeneratorExit, AbortedError, _KilledError,
)  # fmt: skip
"""Errors after which a request for the same context can go on."""


@dataclass(eq=False)
class _Storing:
    """Context that is being stored or is queued."""

    id: str
    salt: str | None
    tell: Callable[[str], None]
    """Function that is called with each new progress."""
    progress: str = "waiting"
    deadline: asyncio.Timeout | None = None

    def reached(self, progress: str) -> None:
        self.progress = progress
        self.tell(progress)
        if self.deadline is not None:
            self.deadline.reschedule(asyncio.get_running_loop().time() + _DEADLINE_S)


def _unheard(_progress: str) -> None:
    """Progress that nobody asked for."""


class StoredCreation:
    """Creation of one server's contexts. One is computed at a time, and one is stored.

    Args:
        manager: SGLang's ``TokenizerManager``.
        directories: directories of the configuration, one for each device.
        folders: folder of contexts in each directory.
        pool: tokens that the device's KV pool holds.
        in_parts: whether a context may be larger than the pool, or continue another one.
        copies: copies of each block.
        fingerprint: fingerprint of the model.
        limits: limits of the contexts.
    """

    def __init__(
        self,
        manager: TokenizerManager,
        directories: Sequence[Path],
        folders: Sequence[Path],
        *,
        pool: int,
        in_parts: bool,
        copies: int,
        fingerprint: str,
        limits: Limits,
    ) -> None:
        self._manager, self._directories, self._folders = manager, directories, folders
        self._in_parts, self._fingerprint, self._copies = in_parts, fingerprint, copies
        self._limits = limits
        # Half of the pool is left to other requests.
        self._largest = pool // 2 if in_parts else pool - ROOM
        # While a context is profiled and stored, the next one is computed.
        self._computing, self._building = asyncio.Lock(), asyncio.Lock()
        self._reading = ThreadPoolExecutor(1, "sgl_ext-stored-text")
        self.requests = OwnRequests(manager, "the context")
        """Requests in progress that compute contexts."""
        self._storing: list[_Storing] = []

    def progress(self, salt: str | None) -> dict[str, str]:
        """Returns the progress of the tenant's contexts that are being stored, by id."""
        return {one.id: one.progress for one in [*self._storing] if one.salt == salt}

    async def create(
        self,
        text: str | Sequence[int],
        salt: str | None,
        tell: Callable[[str], None] = _unheard,
        base: str | None = None,
    ) -> str:
        """Computes, profiles and stores a context; returns its id.

        Args:
            tell: called with the context's progress, as :meth:`progress` returns it, when it
                changes.
            base: id of the stored context that the text continues, if any. It is not changed.

        Raises:
            UnknownContextError: the tenant has no context ``base``.
            ExtError: see :meth:`record`, ``base`` cannot be continued, or the context cannot be
                stored.
        """
        async with self._recorded(text, salt, tell, base) as (one, record):
            await self._store(one, record, base)
        return one.id

    async def record(self, text: str | Sequence[int], salt: str | None) -> Path:
        """Computes and records a context; returns the folder, which ``sgl-ext cluster`` stores.

        Raises:
            BusyError: too many other contexts are being stored.
            ExtError: the context is too long or too short, has token ids beyond the vocabulary, has
                no room on the devices, cannot be computed or recorded, or is late.
        """
        async with self._recorded(text, salt, _unheard) as (_, record):
            return record.rename(record.with_suffix(".context"))

    @asynccontextmanager
    async def _recorded(
        self,
        text: str | Sequence[int],
        salt: str | None,
        tell: Callable[[str], None],
        base: str | None = None,
    ) -> AsyncIterator[tuple[_Storing, Path]]:
        """Computes and records a context, and yields it and the folder of the record.

        Removes the folder in the end, and all files of the context if it cannot be stored.
        """
        if len(self._storing) >= _AT_ONCE:
            raise BusyError(
                f"{_AT_ONCE} contexts are already being stored or waiting; try again later"
            )
        one = _Storing(new_id(), salt, tell)
        self._storing.append(one)
        try:
            async with asyncio.timeout(_DEADLINE_S) as one.deadline:
                known = await self._in_thread(self._base, base, salt)
                tokens = await self._in_thread(self._limits.tokens_of, text, known)
                behind = 0 if known is None else known.tokens
                require_room = partial(self._limits.require_room, behind + len(tokens), known)
                key = self._key(tokens, salt, base)
                with ExitStack() as held:
                    try:
                        record = await self._in_thread(self._claim, one, key, require_room, held)
                        async with self._computing:
                            await Recording(
                                self._manager, self.requests, record, one.id, salt, self._largest,
                                lambda done: one.reached(f"computing {done}/{len(tokens)}"),
                                base, behind,
                            ).record(tokens)  # fmt: skip
                        async with self._building:
                            yield one, record
                        await self._in_thread(remove_record, record)
                    except GeneratorExit as error:  # nothing may be awaited
                        self._clean(one.id, error)
                        raise
                    except BaseException as error:
                        await self._in_thread(self._give_back, one.id, error, held)
                        raise
        except BaseException as error:
            if isinstance(error, TimeoutError):
                raise ExtError(
                    f"storing the context made no progress for {_DEADLINE_S:g} s; it was at: "
                    f"{one.progress}; try again when the server has less load"
                ) from None
            if isinstance(error, OSError):
                raise ExtError(
                    f"cannot store the context on device 0: {reason_of(error)}; check the device"
                ) from None
            raise
        finally:
            self._storing.remove(one)

    async def _in_thread(self, work: Callable[..., T], *args: object) -> T:
        """Returns the result of work on files, which is done in a thread.

        If it is cancelled, the work is waited for: it may hold what has to be released.
        """
        working = asyncio.get_running_loop().run_in_executor(self._reading, partial(work, *args))
        cancelled: asyncio.CancelledError | None = None
        while not working.done():
            try:
                await asyncio.wait({working})
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            working.exception()  # else asyncio logs it
            raise cancelled
        return working.result()

    def _claim(
        self, one: _Storing, key: str, require_room: Callable[[Path], None], held: ExitStack
    ) -> Path:
        """Returns the folder of a context's record, for which ``held`` has the locks.

        Raises:
            ExtError: a device has no room.
            OSError: the folder cannot be created.
        """
        first = self._folders[0]
        held.enter_context(storing(first))
        try:
            one.id, record = held.enter_context(claimed(first, key))
        except OSError as error:
            if error.errno not in FULL:
                raise
            require_room(record_folder(first, one.id))  # removes old records
            one.id, record = held.enter_context(claimed(first, key))
        require_room(record)
        return record

    def _give_back(self, id_: str, error: BaseException, held: ExitStack) -> None:
        """Removes the files of a context that is not stored, and then releases its record."""
        with held:
            self._clean(id_, error)

    def _clean(self, id_: str, error: BaseException) -> None:
        """Removes the files of a context that is not stored.

        What was computed is kept if storing was interrupted and did not fail.
        """
        record = record_folder(self._folders[0], id_)
        try:
            if isinstance(error, _INTERRUPTED) and any(record.glob(f"*{PART}")):
                # The storing process may have written the index before it was killed.
                remove_indexes(id_, self._folders)
                remove_blocks(id_, self._folders)
            else:
                remove(id_, self._folders)
        except OSError as failed:
            logger.warning(
                "files of context %s, which is not stored, cannot be removed until a server "
                "starts: %s", id_, reason_of(failed),
            )  # fmt: skip

    def _base(self, id_: str | None, salt: str | None) -> About | None:
        """Returns the description of a context that is to be continued; None if there is none.

        Raises:
            UnknownContextError: the tenant has no such context.
            ExtError: the context cannot be continued.
        """
        if id_ is None:
            return None
        if not self._in_parts:
            raise ExtError(
                "a context can be continued only if the KV pool is in host memory; store the whole "
                "text instead"
            )
        found = about_of(id_, self._folders, salt)
        if found.geometry.fingerprint != self._fingerprint:
            raise ExtError(f"context {id_} was not stored for this model; store it again")
        require_no_loss(id_, require_files(id_, found, self._folders))
        return found

    def _key(self, tokens: Sequence[int], salt: str | None, base: str | None) -> str:
        """Returns the key of a record, see :func:`claimed`."""
        found = xxhash.xxh3_128(np.array(tokens, np.int32).tobytes())
        size = part_size(len(tokens), self._largest)
        found.update(repr((self._fingerprint, size, salt, base)).encode())
        return found.hexdigest()

    async def _store(self, one: _Storing, record: Path, base: str | None) -> None:
        # What a process has left that was killed with its server.
        await self._in_thread(remove_indexes, one.id, self._folders)
        await self._in_thread(remove_blocks, one.id, self._folders)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "sgl_ext.clusters.job", record, one.id, *self._directories,
            "--server", str(os.getpid()), "--copies", str(self._copies),
            *(() if base is None else ("--base", base)),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        told = ""
        try:
            if process.stdout is not None:
                async for line in process.stdout:
                    told = line.decode(errors="replace").strip()
                    if _LAYERS.fullmatch(told):
                        one.reached(f"layer {told}")
            await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode is not None and -process.returncode in _KILLED_BY:
            memory = (
                ""
                if process.returncode != -signal.SIGKILL
                else (", perhaps because the machine has too little memory")
            )
            raise _KilledError(
                f"the process that stores the context was killed by signal {-process.returncode}"
                f"{memory}; send the request again: it resumes from the KV already recorded"
            )
        if process.returncode:
            logger.error("cannot store context %s: %s", one.id, told)
            if not told.startswith(_SAYS):
                raise ExtError("cannot store the context; see the server's log")
            for device, directory in enumerate(self._directories):
                told = told.replace(str(directory), f"device {device}")
            raise ExtError(told.removeprefix(_SAYS))
