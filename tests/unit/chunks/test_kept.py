"""Contexts in a database outlive their registry, for one model and in one server at a time."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import cast

import msgspec
import pytest

from sgl_ext.chunks.contexts import Context, Contexts
from sgl_ext.chunks.kept import KeptContexts
from sgl_ext.errors import ExtError, UnknownContextError


class Time:
    """Clock of a server, which begins anew, and the wall clock."""

    def __init__(self, wall: float) -> None:
        self.now, self.started = wall, wall

    def clock(self) -> float:
        return self.now - self.started

    def wall(self) -> float:
        return self.now


def opened(directory: Path, time: Time, limit: int = 16) -> tuple[Contexts, KeptContexts]:
    kept = KeptContexts(directory, "a model", time.wall)
    return Contexts(limit, time.clock, kept), kept


def test_contexts_are_found_after_a_restart(tmp_path: Path) -> None:
    contexts, kept = opened(tmp_path, time := Time(1000.0))
    text = "a text with \ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")
    first = contexts.create(
        [1, 2, 3], method="lego-1", text=text, before=[7, 8], recompute=[0, 2], blend=5, salt="a"
    )
    short = contexts.create([4], method="naive", before=[7, 8], query=5, ttl=10)
    long = contexts.create([5], method="naive", ttl=100)
    deleted = contexts.create([6], method="naive")
    contexts.delete(deleted.id)
    unkept = contexts.create([9], method="naive", keep=False)
    kept.commit()
    uncommitted = contexts.create([10], method="naive")
    kept.close()

    time = Time(1020.0)
    contexts, kept = opened(tmp_path, time)
    assert contexts.get(first.id, "a") == first
    assert contexts.find(text, "a") == first
    found = contexts.get(long.id)
    assert found.expires == pytest.approx(80)
    assert [each.id for each in contexts.all()] == [long.id]
    for gone in (short, deleted, unkept, uncommitted):
        with pytest.raises(UnknownContextError):
            contexts.get(gone.id, gone.salt)
    time.now += 90
    assert len(contexts) == 1  # and the expired one is removed from the database
    kept.commit()
    assert [each.id for each, _ in kept.all()] == [first.id]
    kept.close()


def test_the_limit_holds_after_a_restart(tmp_path: Path) -> None:
    contexts, kept = opened(tmp_path, time := Time(0.0))
    made = [contexts.create([at], method="naive") for at in range(20)]
    kept.commit()
    kept.close()
    contexts, kept = opened(tmp_path, time, limit=3)
    assert [each.id for each in contexts.all()] == [each.id for each in made[-3:]]
    kept.close()


def test_probes_remove_no_kept_context(tmp_path: Path) -> None:
    contexts, kept = opened(tmp_path, time := Time(0.0))
    made = [contexts.create([at], method="naive") for at in range(16)]
    kept.commit()
    kept.close()
    contexts, kept = opened(tmp_path, time)
    probes = [contexts.create([at], method="naive", keep=False, salt="probe") for at in range(7)]
    for each in probes:
        contexts.delete(each.id, "probe")
    kept.commit()
    assert contexts.all() == made
    assert [each for each, _ in kept.all()] == made
    for at in range(100):
        contexts.create([at], method="naive", keep=False, salt="probe")
    assert len(contexts) == 16 + 8
    kept.close()


def test_contexts_are_pinned_after_a_restart(tmp_path: Path) -> None:
    contexts, kept = opened(tmp_path, time := Time(1000.0), limit=30)
    made = [contexts.create([at], method="naive", ttl=100) for at in range(20)]
    time.now += 10
    for at, pinned in ((0, True), (1, True), (1, False), (2, True)):
        contexts.pin(made[at].id, pinned=pinned)
    kept.commit()
    kept.close()
    time = Time(1020.0)
    contexts, kept = opened(tmp_path, time, limit=10)
    found = contexts.all()
    assert [each.tokens for each in found] == [(0,), (2,), *((at,) for at in range(12, 20))]
    assert [each.pinned for each in found] == [True] * 2 + [False] * 8
    assert [each.expires for each in found] == pytest.approx([80] * 10)
    kept.close()
    kept = KeptContexts(tmp_path, "a model", time.wall)
    with pytest.raises(ExtError, match=r"2 contexts are pinned, .* chunks.limit to 10 or more"):
        Contexts(9, time.clock, kept)
    kept.close()


def test_contexts_that_earlier_releases_have_kept_are_not_pinned(tmp_path: Path) -> None:
    contexts, kept = opened(tmp_path, Time(0.0))
    made = contexts.create([1], method="naive")
    ((content,),) = kept._db.execute("SELECT content FROM contexts").fetchall()
    earlier = msgspec.msgpack.decode(content)
    assert earlier.pop("pinned") is False
    kept._db.execute("UPDATE contexts SET content = ?", (msgspec.msgpack.encode(earlier),))
    assert [*kept.all()] == [(made, None)]
    kept.close()


def test_contexts_of_another_model_are_kept_but_not_seen(tmp_path: Path) -> None:
    contexts, kept = opened(tmp_path, time := Time(0.0))
    made = contexts.create([1], method="naive")
    later = contexts.create([2], method="naive", ttl=10)
    kept.commit()
    assert kept.others() == 0
    kept.close()
    other = KeptContexts(tmp_path, "another model", time.wall)
    assert not [*other.all()]
    assert other.others() == 2
    time.now += 11
    assert other.others() == 1
    other.close()
    (file,) = tmp_path.glob("*.sqlite")
    with sqlite3.connect(file) as database:
        database.execute("INSERT INTO contexts (id, model, content) VALUES ('x', 'third', X'78')")
    database.close()
    other = KeptContexts(tmp_path, "another model", time.wall)
    assert other.others() == 2  # one that cannot be decoded
    other.close()
    time.now -= 11
    contexts, kept = opened(tmp_path, time)
    assert contexts.get(made.id) == made
    assert later.id not in contexts  # removed after it had expired
    kept.close()


def test_a_database_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    kept = KeptContexts(tmp_path, "a model")
    program = "import sys; from pathlib import Path; from sgl_ext.chunks.kept import KeptContexts\n"
    program += "KeptContexts(Path(sys.argv[1]), 'a model')"
    second = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=False
    )
    assert "check that no other server uses the file" in second.stderr
    kept.close()
    (file,) = tmp_path.glob("*.sqlite")
    assert file.stat().st_mode & 0o777 == 0o600
    with sqlite3.connect(file) as database:
        database.execute("PRAGMA user_version = 9")
    database.close()
    with pytest.raises(ExtError, match="has version 9, but sgl_ext reads version 1"):
        KeptContexts(tmp_path, "a model")
    file.write_bytes(b"nothing of the kind" * 500)
    with pytest.raises(ExtError, match=r"contexts cannot be kept in .* not a database"):
        KeptContexts(tmp_path, "a model")
    with pytest.raises(ExtError, match=r"contexts cannot be kept in .* No such file"):
        KeptContexts(tmp_path / "missing", "a model")


def test_a_context_that_cannot_be_kept_is_not_created(tmp_path: Path) -> None:
    contexts, kept = opened(tmp_path, Time(0.0))
    kept._db.execute("PRAGMA max_page_count = 8")
    with pytest.raises(ExtError, match="full; check the device"):
        for _ in range(100):
            contexts.create(range(1000), method="naive")
            kept.commit()
    assert len(contexts) == len([*kept.all()])
    kept.close()


def test_changes_that_an_error_has_undone_are_not_committed(tmp_path: Path) -> None:
    """SQLite undoes a whole transaction where the disk is full, and not only the statement."""
    contexts, kept = opened(tmp_path, Time(0.0))
    one = contexts.create((1,), method="naive")
    kept.commit()
    contexts.create((2,), method="naive")
    statement = kept._db

    class Full:
        in_transaction = True

        def execute(self, *_: object) -> None:
            statement.rollback()
            self.in_transaction = False
            raise sqlite3.OperationalError("database or disk is full")

    kept._db = cast(sqlite3.Connection, Full())
    with pytest.raises(ExtError, match="disk is full"):
        kept.remove(one.id)
    kept._db = statement
    with pytest.raises(ExtError, match="disk is full"):
        kept.commit()
    contexts.undo(contexts.take_changes())
    kept.add(Context("ctx-3", None, (3,), "naive", (), (), 0, None, None), None)
    kept.commit()
    assert [each.tokens for each, _ in kept.all()] == [(1,), (3,)]
    kept.close()
