"""Service of stored contexts in SGLang's tokenizer process."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sgl_ext.clusters.about import About
from sgl_ext.clusters.arrays import DamagedError
from sgl_ext.clusters.files import names, own_folders, remove, require, require_writable, unknown
from sgl_ext.clusters.geometry import Geometry
from sgl_ext.clusters.stored import about_of, require_files
from sgl_ext.config import Clusters
from sgl_ext.engine.clusters.creation import StoredCreation
from sgl_ext.engine.clusters.limits import Limits
from sgl_ext.engine.clusters.parameters import RECORDED, FollowsStored, said
from sgl_ext.engine.clusters.recording import ROOM
from sgl_ext.engine.core.own_requests import is_own
from sgl_ext.engine.core.power import Front
from sgl_ext.engine.core.sglang_types import GenerateReqInput, TokenizerManager
from sgl_ext.engine.front.custom_params import STORED, custom_params
from sgl_ext.errors import ExtError, UnknownContextError
from sgl_ext.marks import marked

logger = logging.getLogger(__name__)


class StoredInfo(msgspec.Struct, frozen=True):
    """Description of a stored context for users."""

    id: str
    tokens: int
    bytes: int
    """Bytes of the context's blocks on the devices, all copies together."""
    index_bytes: int
    """Bytes of the index without sinks and window, which is in memory while requests follow the
    context."""
    model: str
    """Fingerprint of the model that computed the KV."""


class StoredService(Front):
    """Stored contexts of one server.

    Args:
        manager: SGLang's ``TokenizerManager``.
        config: the ``clusters`` section.
        pool: tokens that the device's KV pool holds.
        in_parts: whether a context may be larger than the pool.
        geometry: geometry of the model's KV.
    """

    def __init__(
        self,
        manager: TokenizerManager,
        config: Clusters,
        *,
        pool: int,
        in_parts: bool,
        geometry: Geometry,
    ) -> None:
        self._manager, self._folders = manager, own_folders(config.directories)
        most = (manager.context_len if in_parts else min(manager.context_len, pool)) - ROOM
        limits = Limits(manager, self._folders, most=most, copies=config.copies, geometry=geometry)
        self.creation = StoredCreation(
            manager, config.directories, self._folders, pool=pool, in_parts=in_parts,
            copies=config.copies, fingerprint=geometry.fingerprint, limits=limits,
        )  # fmt: skip
        self._told: set[tuple[str, str]] = set()
        """Ids of contexts that have been logged, each with what is wrong."""

    def accept(self, request: GenerateReqInput) -> None:
        """Checks a user's request, and removes parameters that only this service may set.

        Raises:
            UnknownContextError: the request follows a context that does not exist or belongs to
                another tenant.
            ExtError: the request's parameter is invalid, its ``extra_key`` is reserved, it combines
                beams with a context, or the context is damaged.
        """
        if is_own(self._manager, request):
            return
        key = getattr(request, "extra_key", None)  # requests for embeddings have none
        keys = key if isinstance(key, list) else [key]
        if any(isinstance(key, str) and key.startswith("ext:") for key in keys):
            raise ExtError(
                "an extra_key that begins with ext: is reserved for the server; use another"
            )
        params, salt = request.sampling_params, getattr(request, "cache_salt", None)
        several, follow = isinstance(params, list), []
        salts = salt if isinstance(salt, list) and salt else [salt]
        for at, each in enumerate(params if several else [params]):
            custom = custom_params(each)
            custom.pop(RECORDED, None)
            follow.append(custom.get(STORED) is not None)
            if follow[-1]:
                own = salts[at : at + 1] if several else salts
                custom[STORED] = self._followed(custom[STORED], each, own or salts)
        if any(follow) and request.text:
            self._encode(request, follow if several else follow[0])

    def _encode(self, request: GenerateReqInput, follow: bool | Sequence[bool]) -> None:
        """Replaces the texts of prompts by token ids, without the first token of a text (BOS) where
        a prompt follows a context: the context has it.

        Does nothing for models without such a token, and for requests that SGLang will refuse.

        Args:
            follow: whether each prompt, or all of them, follow a context.
        """
        tokenizer, text = self._manager.tokenizer, request.text
        texts = [text] if isinstance(text, str) else text
        each = [follow] * len(texts) if isinstance(follow, bool) else [*follow]
        strange = len(each) != len(texts) or not all(isinstance(one, str) for one in texts)
        # A prompt with chunks is not encoded here, and may not follow a context.
        if tokenizer is None or strange or any(map(marked, texts)):
            return
        if not tokenizer.encode("", add_special_tokens=True):
            return
        ids = [
            tokenizer.encode(one, add_special_tokens=not follows)
            for one, follows in zip(texts, each, strict=True)
        ]
        request.text, request.input_ids = None, ids[0] if isinstance(text, str) else ids

    def _followed(
        self, value: object, params: Mapping[str, object], salts: Sequence[Any]
    ) -> dict[str, object]:
        """Returns the validated ``ext_stored`` value of a request."""
        try:
            follows = said(value, FollowsStored)
        except ValueError as error:
            raise ExtError(str(error)) from None
        if params.get("beam_width") not in (None, 0, 1):
            raise ExtError("beam search does not support stored contexts; omit one of the two")
        for salt in salts:
            for id_ in follows.ids:
                self._about(id_, salt)
        found: dict[str, object] = msgspec.to_builtins(follows)
        return found

    def _about(self, id_: str, salt: str | None) -> About:
        """Returns the description of the tenant's context with this id.

        Raises:
            UnknownContextError: the tenant has no such context.
            ExtError: the context's index is damaged or cannot be read.
        """
        return about_of(id_, self._folders, salt)

    def all(self, salt: str | None) -> tuple[list[StoredInfo], dict[str, str], int]:
        """Returns the tenant's contexts, errors by id, and the number of contexts whose index is
        damaged or cannot be read.

        The errors are those of the tenant's contexts that cannot be read. The tenant is unknown
        without the index, so only the log names such a context.
        """
        found, unreadable, damaged = [], {}, 0
        for id_ in names(self._folders):
            try:
                about_it = self._about(id_, salt)
            except UnknownContextError:
                continue  # of another tenant, or deleted in the meantime
            except ExtError as error:
                damaged += id_ in names(self._folders)
                found_it = "is damaged" if isinstance(error, DamagedError) else "cannot be read"
                if (id_, found_it) not in self._told:
                    self._told.add((id_, found_it))
                    logger.warning("stored context %s %s: %s", id_, found_it, error)
                continue
            try:
                found.append(self._describe(id_, about_it))
            except UnknownContextError:
                continue
            except ExtError as error:
                unreadable[id_] = str(error)
        return found, unreadable, damaged

    def describe(self, id_: str, salt: str | None) -> StoredInfo:
        """Returns the description of one of the tenant's contexts.

        Raises:
            UnknownContextError: the tenant has no context with this id.
            ExtError: the context is damaged, or its files are missing.
        """
        return self._describe(id_, self._about(id_, salt))

    def _describe(self, id_: str, found: About) -> StoredInfo:
        blocks = found.blocks
        require_files(id_, found, self._folders)
        try:
            index = require(id_, self._folders)[0].stat().st_size
        except FileNotFoundError:
            raise unknown(id_) from None
        resident = (found.sinks + found.window) * blocks.entry_bytes * blocks.layers
        stored = blocks.copies * blocks.layers * blocks.blocks * blocks.block_bytes
        fingerprint = found.geometry.fingerprint
        return StoredInfo(id_, found.tokens, stored, index - resident, fingerprint)

    def delete(self, id_: str, salt: str | None) -> None:
        """Deletes one of the tenant's contexts, or a damaged context of any tenant.

        Requests that follow the context continue to their end.

        Raises:
            UnknownContextError: the tenant has no context with this id.
            ExtError: the files cannot be removed. Nothing is deleted if the index cannot be read,
                or a file system is read-only or cannot be reached.
        """
        require(id_, self._folders)
        try:
            self._about(id_, salt)
        except DamagedError as error:
            logger.warning("deleting stored context %s, which is damaged: %s", id_, error)
        require_writable(id_, self._folders)
        try:
            remove(id_, self._folders)
        except OSError as error:
            raise ExtError(
                f"context {id_} cannot be deleted: {error.strerror}; check the devices"
            ) from None
