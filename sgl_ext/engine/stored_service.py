"""Stores contexts, in the process of SGLang's tokenizer."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from sgl_ext.clusters.stored import (
    UnknownContextError,
    about,
    failed_file,
    index_file,
    names,
    new_id,
    recorded_file,
    remove,
    require,
    storing,
)
from sgl_ext.config import Clusters
from sgl_ext.engine.own_requests import OwnRequests
from sgl_ext.engine.stored_parameters import RECORDED, STORED, FollowsStored, IsRecorded
from sgl_ext.errors import ExtError

_QUERIES = 512
"""Last tokens of a context, whose queries profile it."""
_ASKED = (
    "\n\nSummarize the text above.",
    "\n\nWhat is the main point of this text?",
    "\n\nWho is mentioned in the text, and what did they do?",
    "\n\nList the places and dates in the text.",
    "\n\nWhy did this happen?",
    "\n\nExplain the most important details.",
)
"""What any text can be asked; the answers' queries profile the context, too."""
_ANSWER = 24
_WRITE_DEADLINE_S = 120.0
_STORE_DEADLINE_S = 3600.0


class StoredInfo(msgspec.Struct, frozen=True):
    """What users are told of a stored context."""

    id: str
    tokens: int
    bytes: int
    """On the devices."""
    index_bytes: int
    """That a server has in memory while requests follow it."""
    model: str
    """Fingerprint of the model whose KV it is."""


class StoredService:
    """Stored contexts of one server.

    Args:
        manager: SGLang's ``TokenizerManager``.
        pool: tokens that the device's KV holds.
    """

    def __init__(self, manager: Any, config: Clusters, pool: int) -> None:
        self._manager, self._config = manager, config
        self._most = min(manager.context_len, pool) - 2 * _QUERIES
        self._one = asyncio.Lock()
        self._requests = OwnRequests(manager, "the context")
        self.progress: dict[str, str] = {}
        """Of contexts that are being stored: layers that are done."""

    def own(self, request: Any) -> None:
        """Takes out of a user's request what only this service says to schedulers.

        Raises:
            UnknownContextError: it follows a context that is not there.
            ExtError: it asks for KV of another name than its own, or for beams over a context.
        """
        if request in self._requests:
            return
        key = getattr(request, "extra_key", None)  # requests for embeddings have none
        keys = key if isinstance(key, list) else [key]
        if any(isinstance(key, str) and key.startswith("ext:") for key in keys):
            raise ExtError("an extra_key that begins with ext: is the server's own; name another")
        params = request.sampling_params
        for each in params if isinstance(params, list) else [params]:
            custom = each.get("custom_params") if isinstance(each, dict) else None
            if isinstance(custom, dict):
                custom.pop(RECORDED, None)
                if STORED in custom:
                    self._see(custom[STORED], each)

    def _see(self, follows: Any, params: Mapping[str, Any]) -> None:
        if (params.get("beam_width") or 1) > 1:
            raise ExtError("beams do not follow stored contexts; leave out one of the two")
        with suppress(msgspec.ValidationError):  # the scheduler says what is wrong
            require(msgspec.convert(follows, FollowsStored).id, self._config.directories)

    def all(self) -> tuple[list[StoredInfo], dict[str, str]]:
        """Every context that is stored; and those that cannot be read, and why."""
        found, unreadable = [], {}
        for id_ in names(self._config.directories):
            try:
                found.append(self.describe(id_))
            except UnknownContextError:
                continue  # deleted in the meantime
            except ExtError as error:
                unreadable[id_] = str(error)
        return found, unreadable

    def describe(self, id_: str) -> StoredInfo:
        """One of them.

        Raises:
            UnknownContextError: there is none of that id.
        """
        directories = self._config.directories
        found = about(id_, directories)
        blocks = found.blocks
        try:
            index = index_file(directories[0], id_).stat().st_size
        except FileNotFoundError:
            raise UnknownContextError(f"there is no stored context {id_}") from None
        resident = (found.sinks + found.window) * blocks.entry_bytes * blocks.layers
        return StoredInfo(
            id_, found.tokens, blocks.layers * blocks.blocks * blocks.block_bytes,
            index - resident, found.geometry.fingerprint,
        )  # fmt: skip

    def delete(self, id_: str) -> None:
        """Requests that follow it go on to their end.

        Raises:
            UnknownContextError: there is none of that id.
        """
        if id_ not in names(self._config.directories):  # and not any file that it may name
            raise UnknownContextError(f"there is no stored context {id_}")
        remove(id_, self._config.directories)

    async def create(self, text: str | Sequence[int]) -> StoredInfo:
        """Computes, profiles and stores a context; one at a time.

        Raises:
            ExtError: see :meth:`record`; or it cannot be stored.
        """
        async with self._recorded(text) as (id_, record):
            await self._store(id_, record)
        return self.describe(id_)

    async def record(self, text: str | Sequence[int]) -> Path:
        """Computes and profiles a context, to be stored by ``sgl-ext cluster``; returns the file.

        Raises:
            ExtError: it is too long, or has token ids beyond the vocabulary.
        """
        async with self._recorded(text) as (_, record):
            return record.rename(record.with_suffix(".context"))

    @asynccontextmanager
    async def _recorded(self, text: str | Sequence[int]) -> AsyncIterator[tuple[str, Path]]:
        """A context that has been written down, and its file."""
        tokens = self._tokens_of(text)
        async with self._one:
            id_ = new_id()
            record = recorded_file(self._config.directories[0], id_)
            try:
                self.progress[id_] = "computing"
                with storing(self._config.directories[0]):
                    async with asyncio.timeout(_STORE_DEADLINE_S):
                        await self._record(id_, tokens)
                        await self._written(record)
                        yield id_, record
            except BaseException as error:
                remove(id_, self._config.directories)
                if isinstance(error, TimeoutError):
                    raise ExtError(
                        f"the context was not stored in {_STORE_DEADLINE_S:g} s; it was at "
                        f"{self.progress[id_]}"
                    ) from None
                raise
            finally:
                record.unlink(missing_ok=True)
                del self.progress[id_]

    def _tokens_of(self, text: str | Sequence[int]) -> list[int]:
        if isinstance(text, str):
            tokens: list[int] = self._manager.tokenizer.encode(text)
        else:
            tokens = list(text)
            size = self._manager.model_config.vocab_size
            if wrong := [token for token in tokens if not 0 <= token < size]:
                raise ExtError(f"the token ids {wrong[:3]} are beyond the vocabulary of {size}")
        if len(tokens) > self._most:
            raise ExtError(
                f"the context has {len(tokens)} tokens; model and KV pool take {self._most} with "
                "what profiles it"
            )
        return tokens

    async def _record(self, id_: str, tokens: list[int]) -> None:
        """Has the scheduler compute the context and what it is asked, and write it all down."""
        await self._ask(id_, tokens, IsRecorded(id_, len(tokens), _QUERIES, last=False), 0)
        for number, question in enumerate(_ASKED, 1):
            asked = self._manager.tokenizer.encode(question, add_special_tokens=False)
            how = IsRecorded(id_, len(tokens), 0, last=number == len(_ASKED))
            entries = await self._ask(id_, [*tokens, *asked], how, _ANSWER)
        if not any(entry.get("recorded") for entry in entries):
            raise ExtError(
                "the context had to give way to other requests while it was computed; try again "
                "when the server has less to do, or give it more KV memory"
            )

    async def _ask(
        self, id_: str, tokens: list[int], how: IsRecorded, answer: int
    ) -> list[dict[str, Any]]:
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = GenerateReqInput(
            input_ids=tokens,
            sampling_params={
                "max_new_tokens": answer, "temperature": 0,
                "custom_params": {RECORDED: msgspec.to_builtins(how)},
            },
            extra_key=f"ext:recorded:{id_}",  # nothing of it has been computed before
        )  # fmt: skip
        found = await self._requests.answer(request)
        entries: list[dict[str, Any]] = found["meta_info"].get("ext", [])
        return entries

    async def _written(self, record: Path) -> None:
        """The scheduler writes beside its other work."""
        end = time.monotonic() + _WRITE_DEADLINE_S
        failed = failed_file(record.parent, record.stem)
        while not record.exists():
            if failed.exists():
                raise ExtError(f"the context cannot be stored: {failed.read_text()}")
            if time.monotonic() > end:
                raise ExtError(f"{record} was not written in {_WRITE_DEADLINE_S:g} s; try again")
            await asyncio.sleep(0.05)

    async def _store(self, id_: str, record: Path) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "sgl_ext.clusters.job", record, id_, *self._config.directories,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        said = "it said nothing"
        try:
            if process.stdout is not None:
                async for line in process.stdout:
                    said = line.decode(errors="replace").strip()
                    self.progress[id_] = f"layer {said}"
            await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            raise ExtError(said.removeprefix("sgl_ext: "))
