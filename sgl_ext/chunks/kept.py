"""Contexts in a database on disk, so that their ids outlive the server.

Only the description of a context is kept. Its KV is where SGLang and the tiers have it, or is
computed again when a prompt names the context.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from sgl_ext.chunks.contexts import Context
from sgl_ext.errors import ExtError
from sgl_ext.own_files import open_own

_VERSION = 1
_FILE = "sgl_ext-chunks.sqlite"


class KeptContexts:
    """Database of contexts. Only one server at a time may use it.

    Changes are kept when they are committed. In the database, contexts expire on the wall clock.

    Args:
        directory: directory of the file, which exists.
        model: fingerprint of the KV of the model, which also depends on its data type and on tensor
            parallelism. Contexts of other models are kept, but not seen.
        wall: returns the time of the wall clock in seconds.

    Raises:
        ExtError: the file cannot be used, another server uses it, or it is of another version.
    """

    def __init__(self, directory: Path, model: str, wall: Callable[[], float] = time.time) -> None:
        self._path, self._model, self._wall = directory / _FILE, model, wall
        self._lost: sqlite3.Error | None = None
        """Error after which SQLite has undone changes that are not committed; None without one."""
        try:
            os.close(open_own(self._path))  # creates it with the mode 0600
            self._db = sqlite3.connect(self._path, timeout=0, check_same_thread=False)
            try:
                self._begin()
            except BaseException:
                self._db.close()
                raise
        except (sqlite3.Error, OSError) as error:
            raise ExtError(
                f"contexts cannot be kept in {self._path}: {error}; check that no other server "
                "uses the file and that this user may write it, or choose another chunks.directory"
            ) from None

    def _begin(self) -> None:
        """Locks the database, and creates its table if it is new."""
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in (0, _VERSION):
            raise ExtError(
                f"{self._path} has version {version}, but sgl_ext reads version {_VERSION}; "
                "choose another chunks.directory, or remove the file"
            )
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute(f"PRAGMA user_version = {_VERSION}")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS contexts (place INTEGER PRIMARY KEY, "
                "id TEXT UNIQUE NOT NULL, model TEXT NOT NULL, content BLOB NOT NULL)"
            )

    def all(self) -> Iterator[tuple[Context, float | None]]:
        """Yields the contexts of the model, the first created first, and the seconds until they
        expire, or None if they do not.

        Raises:
            ExtError: the database is damaged.
        """
        for content in self._contents(own=True):
            try:
                context = msgspec.msgpack.decode(content, type=Context)
            except msgspec.MsgspecError as error:
                raise self._damaged(error) from None
            yield context, None if context.expires is None else context.expires - self._wall()

    def others(self) -> int:
        """Returns the number of contexts of other models, without those that have expired.

        Those are removed.

        Raises:
            ExtError: the database is damaged, or cannot be written.
        """
        left, now = 0, self._wall()
        expired = []
        for content in self._contents(own=False):
            try:
                context = msgspec.msgpack.decode(content, type=Context)
            except msgspec.MsgspecError:  # for the server of that model to report
                left += 1
                continue
            if context.expires is not None and context.expires <= now:
                expired.append(context.id)
            else:
                left += 1
        for id_ in expired:
            self.remove(id_)
        self.commit()
        return left

    def _contents(self, *, own: bool) -> Iterator[bytes]:
        """Yields the encoded contexts of the model, or of other models; see :meth:`all`."""
        try:
            found = self._db.execute(
                "SELECT content FROM contexts WHERE (model = ?) = ? ORDER BY place",
                (self._model, own),
            )
            for (content,) in found:
                yield content
        except sqlite3.Error as error:
            raise self._damaged(error) from None

    def _damaged(self, error: Exception) -> ExtError:
        return ExtError(
            f"{self._path} is damaged: {error}; remove the file, and create the contexts again"
        )

    def add(self, context: Context, ttl: float | None) -> None:
        """Adds a context.

        Args:
            ttl: seconds until it expires; None if it does not.

        Raises:
            ExtError: the database cannot be written.
        """
        self._execute(
            "INSERT INTO contexts (id, model, content) VALUES (?, ?, ?)",
            context.id, self._model, self._content(context, ttl),
        )  # fmt: skip

    def update(self, context: Context, ttl: float | None) -> None:
        """Replaces the description of a context if it is there.

        Args:
            ttl: seconds until it expires; None if it does not.

        Raises:
            ExtError: the database cannot be written.
        """
        self._execute(
            "UPDATE contexts SET content = ? WHERE id = ?", self._content(context, ttl), context.id
        )

    def remove(self, id_: str) -> None:
        """Removes a context if it is there.

        Raises:
            ExtError: the database cannot be written.
        """
        self._execute("DELETE FROM contexts WHERE id = ?", id_)

    def commit(self) -> None:
        """Keeps all changes, also if the machine fails from now on.

        Raises:
            ExtError: the database cannot be written. The changes are undone.
        """
        try:
            if self._lost is not None:
                raise self._lost
            self._db.commit()
        except sqlite3.Error as error:
            self.undo()
            raise self._unwritten(error) from None

    def undo(self) -> None:
        """Undoes all changes since the last commit."""
        self._lost = None
        self._db.rollback()

    def close(self) -> None:
        self._db.close()

    def _content(self, context: Context, ttl: float | None) -> bytes:
        expires = None if ttl is None else self._wall() + ttl
        return msgspec.msgpack.encode(replace(context, expires=expires))

    def _execute(self, statement: str, *values: object) -> None:
        begun = self._db.in_transaction
        try:
            self._db.execute(statement, values)
        except sqlite3.Error as error:
            if begun and not self._db.in_transaction:
                self._lost = error
            raise self._unwritten(error) from None

    def _unwritten(self, error: sqlite3.Error) -> ExtError:
        return ExtError(
            f"contexts cannot be kept on disk (chunks.directory): {error}; check the device and "
            "its free space"
        )
