"""Stored contexts over HTTP, without a model: tenants, damaged files, early refusals."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import threading
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import until
from context_kit import Manager
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.utils.auth import add_api_key_middleware
from test_cluster_fuzz import GEOMETRY, OPTIONS, TOKENS, recorded_context, saved

from sgl_ext.clusters import arrays, records
from sgl_ext.clusters.about import About
from sgl_ext.clusters.build import build
from sgl_ext.clusters.files import _locked, names, own_folders
from sgl_ext.clusters.paths import block_file, index_file, part_file, record_folder, scratch_of
from sgl_ext.clusters.profile import Options
from sgl_ext.clusters.records import claimed
from sgl_ext.clusters.stored import Stored
from sgl_ext.config import Clusters, ExtConfig
from sgl_ext.engine.clusters import creation as stored_creation
from sgl_ext.engine.clusters import limits
from sgl_ext.engine.clusters.api import install
from sgl_ext.engine.clusters.attended import Attended
from sgl_ext.engine.clusters.attention import StoredAttention
from sgl_ext.engine.clusters.contexts import StoredContexts
from sgl_ext.engine.clusters.creation import BusyError
from sgl_ext.engine.clusters.limits import Limits
from sgl_ext.engine.clusters.parameters import RECORDED, FollowsStored
from sgl_ext.engine.clusters.power import ClustersPower
from sgl_ext.engine.clusters.recording import ROOM
from sgl_ext.engine.clusters.service import StoredService
from sgl_ext.engine.front.client_gone import ClientGoneError, while_connected
from sgl_ext.engine.front.custom_params import STORED
from sgl_ext.engine.front.errors import refusal
from sgl_ext.errors import ExtError
from sgl_ext.marks import mark
from sgl_ext.memory.rope import Rope
from sgl_ext.memory.transfer import TransferEngine

ROUTE = "/ext/clusters"
MINE = {"cache_salt": "mine"}


class Waiting(Manager):
    """Tokenizer manager whose requests never finish."""

    context_len = 5000

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()

    async def generate_request(self, request: GenerateReqInput) -> AsyncIterator[dict[str, Any]]:
        self.requests.append(request)
        self.asked.set()
        await asyncio.Event().wait()
        yield {}


ROPE = Rope(2, (1.0,))


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Returns directories with one context of a tenant and one context without a tenant."""
    found = [tmp_path_factory.mktemp(f"device{at}") for at in range(2)]
    for name, salt in (("stx-mine", "mine"), ("stx-open", None), ("stx-hers", "hers")):
        build(replace(recorded_context(), salt=salt), name, own_folders(found), OPTIONS)
    return found


@pytest.fixture
def manager() -> Waiting:
    return Waiting()


@pytest.fixture
def service(manager: Waiting, directories: list[Path]) -> StoredService:
    return StoredService(
        manager, Clusters(directories=tuple(directories)), pool=5000, in_parts=True,
        geometry=GEOMETRY,
    )  # fmt: skip


@pytest.fixture
def client(service: StoredService) -> TestClient:
    app = FastAPI()
    app.add_exception_handler(ExtError, refusal)
    install(app, service)
    return TestClient(app)


@pytest.fixture
def index(directories: list[Path]) -> Iterator[Path]:
    """Yields the index file of the tenant's context, and restores it after the test."""
    path = index_file(own_folders(directories)[0], "stx-mine")
    contents = path.read_bytes()
    yield path
    path.write_bytes(contents)


def listed(client: TestClient, **params: str) -> list[str]:
    found = client.get(f"{ROUTE}/list", params=params).json()
    assert found["unreadable"] == found["storing"] == {}
    return [each["id"] for each in found["contexts"]]


def test_contexts_are_visible_to_their_tenant_only(client: TestClient) -> None:
    assert listed(client) == ["stx-open"]
    assert listed(client, **MINE) == ["stx-mine"]
    assert listed(client, cache_salt="other") == []
    assert listed(client, cache_salt="") == ["stx-open"]  # as for SGLang, no salt
    assert client.get(f"{ROUTE}/stx-mine", params=MINE).json()["id"] == "stx-mine"
    for params in ({}, {"cache_salt": "other"}, {"cache_salt": ""}):
        for method in (client.get, client.delete):
            answer = method(f"{ROUTE}/stx-mine", params=params)
            assert answer.status_code == 404
            unknown = method(f"{ROUTE}/stx-none", params=params).json()["error"]["message"]
            assert answer.json()["error"]["message"] == unknown.replace("none", "mine")
    assert client.get(f"{ROUTE}/stx-open", params=MINE).status_code == 404


def follows(id_: Any, **more: Any) -> dict[str, Any]:
    return {"custom_params": {STORED: {"id": id_, **more}, RECORDED: "forged"}}


@pytest.mark.parametrize(
    ("params", "salt", "served"),
    [
        (follows("stx-mine"), "mine", True),
        (follows("stx-mine"), None, False),
        (follows("stx-mine"), "other", False),
        (follows("stx-mine"), ["mine", "mine"], True),
        (follows("stx-mine"), ["mine", "other"], False),
        (follows("stx-mine"), [], False),
        ([follows("stx-open"), follows("stx-mine")], ["", "mine"], True),
        ([follows("stx-mine"), {}], ["mine", "other"], True),
        ([{}, follows("stx-mine")], ["mine", "other"], False),
        ([{}, follows("stx-mine")], ["mine"], True),
        ([{}, follows("stx-open")], None, True),
    ],
)
def test_contexts_are_followed_by_their_tenant_only(
    service: StoredService, params: Any, salt: Any, served: bool
) -> None:
    request = GenerateReqInput(input_ids=[1], sampling_params=params, cache_salt=salt)
    if not served:
        with pytest.raises(ExtError, match=r"stored context 'stx-.*' not found"):
            service.accept(request)
        return
    service.accept(request)
    for each in params if isinstance(params, list) else [params]:
        custom = each.get("custom_params", {})
        assert RECORDED not in custom
        assert custom.get(STORED, {}).get("sparsity") is None


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(
    "params",
    [
        follows(nested(900)),
        follows("stx-open", sparsity=nested(100_000)),
        follows("stx-open", more=nested(900)),
        {"custom_params": {STORED: nested(900)}},
        {"custom_params": {STORED: "stx-open"}},
        {**follows("stx-open"), "beam_width": 2},
        {**follows("stx-open"), "beam_width": "many"},
        follows("stx-open\0"),
        follows("stx-none"),
    ],
    ids=range(9),
)
def test_invalid_follow_parameters_are_refused(service: StoredService, params: Any) -> None:
    with pytest.raises(ExtError):
        service.accept(GenerateReqInput(input_ids=[1], sampling_params=params))


@pytest.mark.parametrize("id_", ["%00", "stx-%00", "a" * 5000, "stx-mine.index", "%ff", "%0A"])
def test_invalid_ids_are_not_found(client: TestClient, id_: str) -> None:
    for method in (client.get, client.delete):
        assert method(f"{ROUTE}/{id_}", params=MINE).status_code == 404


def test_damaged_context_is_counted_logged_once_and_refused(
    client: TestClient, service: StoredService, index: Path, caplog: pytest.LogCaptureFixture
) -> None:
    contents = bytearray(index.read_bytes())
    contents[contents.index(b"tokens")] ^= 1
    index.write_bytes(contents)
    for _ in range(2):
        found = client.get(f"{ROUTE}/list", params=MINE).json()
        assert found == {"contexts": [], "unreadable": {}, "damaged": 1, "storing": {}}
    (said,) = [each.getMessage() for each in caplog.records if each.name.startswith("sgl_ext")]
    assert "stored context stx-mine is damaged" in said
    assert listed(client) == ["stx-open"]
    assert client.get(f"{ROUTE}/stx-mine", params=MINE).status_code == 400
    request = GenerateReqInput(input_ids=[1], sampling_params=follows("stx-mine"), **MINE)
    with pytest.raises(ExtError, match=r"is damaged|not a context file of sgl_ext"):
        service.accept(request)


def test_context_with_missing_blocks_is_listed_as_unreadable(
    client: TestClient, directories: list[Path]
) -> None:
    (file,) = own_folders(directories)[1].glob("stx-mine.1.blocks")
    aside = file.rename(file.with_suffix(".aside"))
    found = client.get(f"{ROUTE}/list", params=MINE).json()
    assert found["contexts"] == []
    assert "No such file" in found["unreadable"]["stx-mine"]
    assert client.get(f"{ROUTE}/list").json()["unreadable"] == {}
    aside.rename(file)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"text": "too short"}, "has 10 tokens, of which 260 stay in memory"),
        ({"input_ids": [1] * 12}, "has 12 tokens, of which 260 stay in memory"),
        ({"input_ids": [1] * 4000}, "has 4000 tokens; this server allows 3976"),
        ({"text": "x" * 4000}, "has 4001 tokens; this server allows 3976"),
        ({"text": "x" * 300_000}, "has 300000 characters; this server allows 3976"),
        ({"input_ids": [1, 200, *[1] * 400]}, "token ids .200. are outside the vocabulary of 200"),
    ],
)  # fmt: skip
def test_invalid_contexts_are_refused_before_they_are_computed(
    client: TestClient, manager: Waiting, body: dict[str, Any], message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    encode = lambda text, **_: [1, *map(ord, text)]  # noqa: E731
    monkeypatch.setattr(Manager, "tokenizer", SimpleNamespace(encode=encode))
    answer = client.post(ROUTE, json=body)
    assert answer.status_code == 400
    assert message.replace(".200.", "[200]") in answer.json()["error"]["message"]
    assert not manager.requests


def test_full_device_is_detected_before_a_context_is_computed(
    client: TestClient, manager: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(free=10_000)
    monkeypatch.setattr(limits.shutil, "disk_usage", lambda _path: free)
    for body in ({"input_ids": [1] * 1000}, {"input_ids": [1] * 100, "base": "stx-open"}):
        answer = client.post(ROUTE, json=body)
        assert answer.status_code == 400
        assert "has not enough free space" in answer.json()["error"]["message"]
    assert not manager.requests


def test_the_reason_stays_where_files_cannot_be_removed(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def read_only(*_args: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    free = SimpleNamespace(free=10_000)
    monkeypatch.setattr(limits.shutil, "disk_usage", lambda _path: free)
    monkeypatch.setattr(stored_creation, "remove", read_only)
    answer = client.post(ROUTE, json={"input_ids": [1] * 1000})
    assert answer.status_code == 400
    assert "has not enough free space" in answer.json()["error"]["message"]
    assert "cannot be removed until a server starts: Read-only" in caplog.text


def test_old_records_make_room_for_a_new_one(
    client: TestClient, directories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted record has filled the first device, so that not even a folder can be made."""
    first = own_folders(directories)[0]
    with claimed(first, "another") as (_, old):
        part_file(old, "kv-0").write_bytes(b"x")
    make, made = records.make_own_folder, list[Path]()

    def make_folder(folder: Path) -> None:
        if old.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        make(folder)
        made.append(folder)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(records, "make_own_folder", make_folder)
    monkeypatch.setattr(limits.shutil, "disk_usage", lambda _path: SimpleNamespace(free=0))
    answer = client.post(ROUTE, json={"input_ids": [1] * 1000})
    assert "has not enough free space" in answer.json()["error"]["message"]
    assert not old.exists()
    assert not made
    monkeypatch.setattr(limits.shutil, "disk_usage", lambda _path: SimpleNamespace(free=1 << 40))
    answer = client.post(ROUTE, json={"input_ids": [1] * 1000})
    assert "Input/output error" in answer.json()["error"]["message"]
    assert made
    assert not [each for each in made if each.exists()]


def test_parts_of_a_record_that_are_there_need_no_room(
    service: StoredService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = service.creation._limits
    with pytest.raises(ExtError, match=r"needs ([\d,]+) B, 0 B are free") as error:
        monkeypatch.setattr(limits.shutil, "disk_usage", lambda _path: SimpleNamespace(free=0))
        asked.require_room(1000, None, tmp_path)
    needed = int(error.value.args[0].partition("needs ")[2].split()[0].replace(",", ""))
    part_file(tmp_path, "kv-0").write_bytes(bytes(4096))
    for free, enough in ((needed - 4096, True), (needed - 4097, False)):
        found = SimpleNamespace(free=free)
        monkeypatch.setattr(limits.shutil, "disk_usage", lambda _path, found=found: found)
        with nullcontext() if enough else pytest.raises(ExtError, match="has not enough"):
            asked.require_room(1000, None, tmp_path)


@pytest.mark.parametrize("copies", [1, 2])
def test_room_is_asked_for_what_is_stored(
    manager: Waiting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: int
) -> None:
    """The check covers a whole context, and continuations with and without a new extent."""
    directories = [tmp_path / name for name in ("a", "b")]
    for each in directories:
        each.mkdir()
    folders = own_folders(directories)
    asked = Limits(manager, folders, most=3000, copies=copies, geometry=GEOMETRY)
    none = tmp_path / "no record"

    def needed(tokens: int, base: About | None) -> list[int]:
        found = []
        for folder in folders:
            free = dict.fromkeys(folders, 1 << 40) | {folder: 0}
            monkeypatch.setattr(
                limits.shutil, "disk_usage", lambda at, free=free: SimpleNamespace(free=free[at])
            )
            try:
                asked.require_room(tokens, base, none)
                found.append(0)
            except ExtError as error:
                found.append(int(str(error).partition("needs ")[2].split()[0].replace(",", "")))
        return found

    whole = needed(TOKENS, None)
    record = GEOMETRY.layers * (
        TOKENS * GEOMETRY.entry_bytes + ROOM * GEOMETRY.heads * GEOMETRY.head_dim * 4
    )
    build(recorded_context(), "stx-a", folders, Options(), copies=copies)
    written = [sum(each.stat().st_size for each in folder.iterdir()) for folder in folders]
    header = 4096  # of the index, at most
    assert written[0] - header <= whole[0] - record <= written[0]
    assert written[1] - header <= whole[1] <= written[1]
    base = Stored.open("stx-a", folders, GEOMETRY).about
    for more, new in ((1, False), (500, True)):
        about = base.continued(base.tokens + more, Options().window)
        assert (about.blocks.extents > base.blocks.extents) == new
        blocks = about.blocks.file_bytes[-1] if new else 0
        index = about.index_bytes if copies > 1 else 0
        assert needed(base.tokens + more, base)[1] == blocks + index


@pytest.mark.parametrize(
    ("changed", "body", "status", "message"),
    [
        ({}, {"cache_salt": "other"}, 404, "stored context 'stx-mine' not found"),
        ({}, {"base": "stx-none"}, 404, "stored context 'stx-none' not found"),
        ({}, {"base": "a" * 300}, 422, "should have at most 256"),
        ({}, {"input_ids": [1] * 3700}, 400, "has 4000 tokens; this server allows 3976"),
        ({"_fingerprint": "b"}, {}, 400, "context stx-mine was not stored for this model"),
        ({"_in_parts": False}, {}, 400, "only if the KV pool is in host memory"),
        ({"_folders": 1}, {}, 400, "stored on 2 devices, but 1 directories are configured"),
    ],
)  # fmt: skip
def test_contexts_that_cannot_be_continued_are_refused(
    service: StoredService, manager: Waiting, changed: dict[str, Any], body: dict[str, Any],
    status: int, message: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, value in changed.items():
        value = service.creation._folders[:value] if name == "_folders" else value
        monkeypatch.setattr(service.creation, name, value)
    app = FastAPI()
    app.add_exception_handler(ExtError, refusal)
    install(app, service)
    asked = {"input_ids": [1] * 10, "base": "stx-mine", **MINE, **body}
    answer = TestClient(app).post(ROUTE, json=asked)
    assert answer.status_code == status, answer.text
    assert message in answer.text
    assert not manager.requests


def test_the_first_part_of_a_context_that_continues_another_follows_it(
    service: StoredService, manager: Waiting
) -> None:
    async def run() -> None:
        created = asyncio.create_task(service.creation.create([1] * 10, "mine", base="stx-mine"))
        await manager.asked.wait()
        created.cancel()

    asyncio.run(run())
    (asked,) = manager.requests
    assert asked.input_ids == [1] * 10
    said = asked.sampling_params["custom_params"][RECORDED]
    expected = {
        "base": "stx-mine", "start": 300, "tokens": 310, "queries": 10, "keep": False,
        "salt": "mine",
    }  # fmt: skip
    assert expected == {name: said[name] for name in expected}


@pytest.mark.parametrize(
    "content",
    [
        '{"text": "\\ud800"}',
        '{"text": "a", "cache_salt": "\\ud800"}',
        '{"text": "a", "cache_salt": 1}',
        '{"text": ""}',
        '{"input_ids": [true]}',
        '{"a": 1}',
        "[]",
        "{",
    ],
)
def test_malformed_bodies_are_refused(client: TestClient, content: str) -> None:
    answer = client.post(ROUTE, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 422


def test_nothing_is_deleted_while_a_device_is_read_only(
    client: TestClient, directories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, statvfs = own_folders(directories)[1], os.statvfs

    def read_only(path: Path) -> Any:
        found = statvfs(path)
        flags = found.f_flag | (os.ST_RDONLY if Path(path) == folder else 0)
        return SimpleNamespace(f_flag=flags)

    monkeypatch.setattr(os, "statvfs", read_only)
    answer = client.delete(f"{ROUTE}/stx-mine", params=MINE)
    assert answer.status_code == 400
    assert "the file system of device 1 is read-only" in answer.text
    assert client.get(f"{ROUTE}/stx-mine", params=MINE).status_code == 200


def test_nothing_is_deleted_while_a_device_is_away(
    client: TestClient, directories: list[Path]
) -> None:
    folder = own_folders(directories)[1]
    away = folder.rename(folder.with_name("away"))
    answer = client.delete(f"{ROUTE}/stx-mine", params=MINE)
    away.rename(folder)
    assert answer.status_code == 400
    assert "device 1 cannot be reached (No such file or directory)" in answer.text
    assert client.get(f"{ROUTE}/stx-mine", params=MINE).status_code == 200


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, os.strerror(errno.EMFILE)), MemoryError()])
def test_an_index_that_cannot_be_read_now_is_not_damaged(
    client: TestClient, error: Exception, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def fail(*_: object) -> int:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(arrays, "open_own", fail)
        answer = client.delete(f"{ROUTE}/stx-hers")  # of another tenant
        assert answer.status_code == 503
        assert "stx-hers.index cannot be read" in answer.text
        assert client.get(f"{ROUTE}/list").json()["contexts"] == []
    assert "is damaged" not in caplog.text
    assert listed(client, cache_salt="hers") == ["stx-hers"]


def test_files_are_not_touched_in_the_event_loop(
    client: TestClient, service: StoredService, monkeypatch: pytest.MonkeyPatch
) -> None:
    looping = dict[str, bool]()

    def watched(target: object, name: str) -> None:
        original = getattr(target, name)

        def call(*args: Any) -> Any:
            with suppress(RuntimeError):  # no loop runs in this thread
                asyncio.get_running_loop()
                looping[name] = True
            looping.setdefault(name, False)
            return original(*args)

        monkeypatch.setattr(target, name, call)

    async def create(*_args: object, **_kw: object) -> str:
        return "stx-open"

    async def refused(*_: object) -> None:
        raise ExtError("it cannot be computed")

    for name in ("storing", "claimed", "remove"):
        watched(stored_creation, name)
    watched(service, "describe")
    monkeypatch.setattr(stored_creation.Recording, "record", refused)
    assert client.post(ROUTE, json={"input_ids": [1] * 1000}).status_code == 400
    monkeypatch.setattr(service.creation, "create", create)
    for stream in (False, True):
        answer = client.post(ROUTE, json={"input_ids": [1] * 1000, "stream": stream})
        assert "stx-open" in answer.text
    assert looping == dict.fromkeys(("storing", "claimed", "remove", "describe"), False)


def test_work_on_files_is_waited_for_when_it_is_cancelled(
    service: StoredService, directories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock that a thread takes must not outlive the request."""
    first, began, go_on = own_folders(directories)[0], threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        began.set()
        go_on.wait(30)
        return claimed(*args)

    monkeypatch.setattr(stored_creation, "claimed", slow)

    async def run() -> None:
        task = asyncio.create_task(service.creation.create([1] * 1000, None))
        await asyncio.to_thread(began.wait, 30)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert not records.records(first)
    with _locked(first, fcntl.LOCK_EX) as ours:
        assert ours


def test_a_record_goes_on_after_its_server_was_killed(
    service: StoredService, tmp_path: Path
) -> None:
    """The storing process of the killed server has left blocks, and perhaps an index."""
    directories = [tmp_path / name for name in ("a", "b")]
    for each in directories:
        each.mkdir()
    creation, folders = service.creation, own_folders(directories)
    creation._directories, creation._folders = directories, folders
    saved(recorded_context(), record := record_folder(folders[0], "stx-late"))
    for device, folder in enumerate(folders):
        block_file(folder, "stx-late", device).write_text("x")
    scratch_of(index_file(folders[0], "stx-late")).write_text("x")
    one = stored_creation._Storing("stx-late", None, lambda _: None)
    asyncio.run(creation._store(one, record, None))
    assert Stored.open("stx-late", folders, GEOMETRY).about.tokens == TOKENS


def test_an_index_that_was_written_before_storing_was_interrupted_is_removed(
    service: StoredService, tmp_path: Path
) -> None:
    creation = service.creation
    folders = own_folders([tmp_path])
    build(recorded_context(), "stx-late", folders, OPTIONS)
    creation._folders = folders
    record = record_folder(folders[0], "stx-late")
    record.mkdir()
    part_file(record, "kv-0000000000").touch()
    creation._clean("stx-late", asyncio.CancelledError())
    assert names(folders) == []
    assert [path.name for path in folders[0].glob("stx-late*") if path != record] == []
    assert part_file(record, "kv-0000000000").exists()


def test_texts_of_prompts_that_follow_a_context_have_no_first_token(
    service: StoredService,
) -> None:
    follows = {"custom_params": {STORED: {"id": "stx-open"}}}
    one: Any = SimpleNamespace(text="ab", input_ids=None, sampling_params=follows)
    service.accept(one)
    assert (one.text, one.input_ids) == (None, [97, 98])
    plain: dict[str, Any] = {}
    several: Any = SimpleNamespace(
        text=["ab", "c"], input_ids=None, sampling_params=[dict(follows), plain]
    )
    service.accept(several)
    assert (several.text, several.input_ids) == (None, [[97, 98], [1, 99]])
    other: Any = SimpleNamespace(text="ab", input_ids=None, sampling_params={})
    service.accept(other)
    assert (other.text, other.input_ids) == ("ab", None)
    linked: Any = SimpleNamespace(
        text=[mark("ctx-a"), "c"], input_ids=None, sampling_params=[plain, dict(follows)]
    )
    service.accept(linked)  # chunks replace the mark
    assert linked.text == [mark("ctx-a"), "c"]


def test_store_queue_is_bounded_and_cancelled_with_its_clients(
    service: StoredService, manager: Waiting, directories: list[Path]
) -> None:
    folders = own_folders(directories)
    before = [*names(folders)]

    async def run() -> None:
        creation, here = service.creation, [True]

        async def gone() -> bool:
            return not here[0]

        request: Any = SimpleNamespace(is_disconnected=gone)
        tasks = [
            asyncio.create_task(while_connected(request, creation.create([1] * 1000, "mine")))
            for _ in range(stored_creation._AT_ONCE)
        ]
        await manager.asked.wait()
        assert sorted(creation.progress("mine").values()) == ["computing 0/1000", *["waiting"] * 7]
        assert creation.progress(None) == {}
        assert len(manager.requests) == 1
        with pytest.raises(BusyError, match="8 contexts are already being stored or waiting"):
            await creation.create([1] * 1000, None)
        assert BusyError.status == 429
        here[0] = False
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(each) for each in found} == {ClientGoneError}
        while creation.progress("mine"):
            await asyncio.sleep(0.01)
        assert not creation._computing.locked()
        assert not creation._building.locked()

    asyncio.run(run())
    assert [*names(folders)] == before
    # Another one may begin when the first one has been cancelled, before its own client is missed.
    assert all(request.cache_salt == "mine" for request in manager.requests)


def test_store_ends_at_its_deadline(
    service: StoredService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_creation, "_DEADLINE_S", 2)
    with pytest.raises(ExtError, match="made no progress for 2 s; it was at: computing"):
        asyncio.run(service.creation.create([1] * 1000, None))


def test_store_deadline_includes_the_wait_for_other_contexts(
    service: StoredService, manager: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        before = asyncio.create_task(service.creation.create([1] * 1000, None))
        await manager.asked.wait()
        monkeypatch.setattr(stored_creation, "_DEADLINE_S", 0.1)
        with pytest.raises(ExtError, match=r"made no progress for 0\.1 s; it was at: waiting"):
            await service.creation.create([1] * 1000, None)
        before.cancel()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("keys", "key", "allowed"),
    [
        ({"api_key": "u", "admin_api_key": "a"}, "u", False),
        ({"api_key": "u", "admin_api_key": "a"}, "a", True),
        ({"api_key": None, "admin_api_key": "a"}, "", False),
        ({"api_key": "u", "admin_api_key": None}, "u", True),
        ({"api_key": None, "admin_api_key": None}, "", True),
    ],
)
def test_store_and_delete_require_the_admin_key_if_it_is_set(
    service: StoredService, keys: dict[str, Any], key: str, allowed: bool
) -> None:
    app = FastAPI()
    app.add_exception_handler(ExtError, refusal)
    install(app, service)
    add_api_key_middleware(app, **keys)
    client = TestClient(app, headers={"Authorization": f"Bearer {key}"} if key else {})
    answers = [client.post(ROUTE, json={}), client.delete(f"{ROUTE}/stx-none")]
    found = [answer.status_code for answer in answers]
    assert found == ([422, 404] if allowed else [401, 401])
    if key != "a":
        assert client.get(f"{ROUTE}/list").status_code == 200


def test_symlinked_and_missing_directories_are_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (folder,) = own_folders([tmp_path])
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    folder.symlink_to(tmp_path / "elsewhere")
    for directory in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ExtError, match="cannot store contexts in"):
            own_folders([directory])


def test_failed_context_is_reopened_once_no_request_follows_it(
    directories: list[Path], index: Path
) -> None:
    contexts = StoredContexts(
        Clusters(directories=tuple(directories)), GEOMETRY, 1000, TransferEngine(), ROPE
    )

    def followed(rid: str) -> StoredAttention:
        params = SimpleNamespace(max_new_tokens=5, min_new_tokens=0)
        req = SimpleNamespace(rid=rid, origin_input_ids=[1], sampling_params=params)
        follower = contexts.ask(req, FollowsStored("stx-mine", 0.2))
        until(lambda: contexts.opened(rid))
        return contexts.context(follower)

    def step(*rids: str) -> None:
        contexts.keep(rids)
        contexts.tidy()

    first = followed("a")
    first.failed = "it failed"
    step("a")
    waiting = contexts.ask(_req("b"), FollowsStored("stx-mine", 0.2))
    assert not contexts.opened("b")  # it would fail as well, and keep the context from others
    assert contexts.waits("b")
    step("a", "b")
    follower = contexts.follower("a")
    assert follower is not None
    assert contexts.context(follower) is first  # it ends with the error of the context
    step("b")
    until(lambda: contexts.opened("b"))
    assert contexts.context(waiting) is not first
    contexts.keep([])
    contexts.tidy()
    second = followed("c")
    assert second is not first
    assert not second.failed
    second.failed = "it failed"
    contexts.keep([])
    contexts.tidy()
    index.write_bytes(index.read_bytes()[:-1])
    with pytest.raises(ExtError, match=r"its arrays take [\d,]+ B, expected [\d,]+ B"):
        followed("d")


def test_new_requests_give_way_to_one_whose_context_has_no_place(directories: list[Path]) -> None:
    config = Clusters(directories=tuple(directories), open=1, wait=60.0)
    contexts = StoredContexts(config, GEOMETRY, 10_000, TransferEngine(), ROPE)
    contexts.ask(_req("running"), FollowsStored("stx-mine", 0.2))
    until(lambda: contexts.opened("running"))
    contexts.ask(_req("waiting"), FollowsStored("stx-open", 0.2))
    assert not contexts.opened("waiting")
    contexts.ask(_req("new"), FollowsStored("stx-mine", 0.2))
    assert contexts.opened("new")
    waiting = contexts.follower("waiting")
    assert waiting is not None
    waiting.tried -= 31
    contexts.keep({"running", "waiting", "new"})  # the next step
    contexts.ask(_req("newer"), FollowsStored("stx-mine", 0.2))
    assert not contexts.opened("newer")
    contexts.keep({"waiting", "newer"})  # the others have ended
    until(lambda: contexts.opened("waiting"))
    contexts.keep({"newer"})
    until(lambda: contexts.opened("newer"))


def test_a_failure_to_open_is_not_told_to_later_requests(
    directories: list[Path], index: Path
) -> None:
    config = Clusters(directories=tuple(directories))
    contexts = StoredContexts(config, GEOMETRY, 10_000, TransferEngine(), ROPE)
    good = index.read_bytes()
    index.write_bytes(good[:-1])
    contexts.ask(_req("gone"), FollowsStored("stx-mine", 0.2))
    until(lambda: not contexts.waits("gone"))
    contexts.keep([])  # its client has left
    contexts.tidy()
    index.write_bytes(good)
    contexts.ask(_req("later"), FollowsStored("stx-mine", 0.2))
    until(lambda: contexts.opened("later"))


def test_requests_for_several_contexts_do_not_wait_for_each_other(directories: list[Path]) -> None:
    """Each needs both places; the second request may not keep one of them from the first."""
    config = Clusters(directories=tuple(directories), open=2)
    contexts = StoredContexts(config, GEOMETRY, 10_000, TransferEngine(), ROPE)
    contexts.ask(_req("running"), FollowsStored("stx-mine", 0.2))
    until(lambda: contexts.opened("running"))
    contexts.ask(_req("first"), FollowsStored(("stx-open", "stx-hers"), 0.2))
    contexts.ask(_req("second"), FollowsStored(("stx-hers", "stx-mine"), 0.2))
    until(lambda: contexts.opened("first") or bool(contexts.keep({"first", "second"})))
    first = contexts.follower("first")
    assert first is not None
    assert first.tokens == contexts.context(first).tokens == 2 * TOKENS
    assert not contexts.opened("second")
    contexts.keep({"second"})
    until(lambda: contexts.opened("second"))


def test_contexts_that_cannot_be_followed_together_are_refused(directories: list[Path]) -> None:
    config = Clusters(directories=tuple(directories), open=2)
    several = FollowsStored(("stx-open", "stx-mine"), 0.2)
    contexts = StoredContexts(config, GEOMETRY, 1000, TransferEngine(), ROPE)
    with pytest.raises(ExtError, match="has one of them twice"):
        contexts.ask(_req("a"), FollowsStored(("stx-open", "stx-open"), 0.2))
    with pytest.raises(ExtError, match="uses 3 stored contexts, but at most 2 can be open"):
        contexts.ask(_req("a"), FollowsStored(("stx-open", "stx-mine", "stx-hers"), 0.2))
    contexts = StoredContexts(config, GEOMETRY, 1000, TransferEngine(), ExtError("no such model"))
    with pytest.raises(ExtError, match="cannot use several contexts: no such model"):
        contexts.ask(_req("a"), several)
    assert not contexts.any


class _Recording:
    """Recorder of the request ``recorded``."""

    any = False

    def __contains__(self, rid: str) -> bool:
        return rid == "recorded"

    def keep(self, rids: Collection[str]) -> None:
        pass


def _power(stored: StoredContexts) -> Any:
    power: Any = ClustersPower(ExtConfig(), SimpleNamespace())  # type: ignore[arg-type]
    power.stored, power.recorder, power._metrics = stored, _Recording(), None
    return power


def _req(rid: str) -> Any:
    params = SimpleNamespace(max_new_tokens=5, min_new_tokens=0)
    return SimpleNamespace(rid=rid, origin_input_ids=[1], sampling_params=params)


def test_requests_that_wait_for_their_context_are_not_restored(
    directories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Clusters(directories=tuple(directories), open=1)
    contexts = StoredContexts(config, GEOMETRY, 1000, TransferEngine(), ROPE)
    power = _power(contexts)
    for rid, id_ in (("a", "stx-mine"), ("b", "stx-open"), ("c", "stx-mine")):
        contexts.ask(_req(rid), FollowsStored(id_, 0.2))
    until(lambda: not any(power.owns(_req(rid)) for rid in ("a", "c")))
    assert [power.owns(_req(rid)) for rid in ("a", "b", "c", "plain", "recorded")] == [
        False, True, False, False, True,
    ]  # fmt: skip
    assert contexts.opened("a")
    contexts.keep(["b"])
    opened, opens = contexts._open._opened, threading.Event()

    def late(id_: str) -> Attended:
        opens.wait(60)
        return opened(id_)

    monkeypatch.setattr(contexts._open, "_opened", late)
    assert not contexts.opened("b")  # closes the other context
    opens.set()
    until(lambda: not power.owns(_req("b")))


def test_waiting_requests_are_compared_once_per_step(
    directories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the oldest one looks for a place."""
    config = Clusters(directories=tuple(directories), open=1)
    contexts = StoredContexts(config, GEOMETRY, 1000, TransferEngine(), ROPE)
    contexts.ask(_req("running"), FollowsStored("stx-mine", 0.2))
    until(lambda: contexts.opened("running"))
    waiting = [f"{number}" for number in range(50)]
    for rid in waiting:
        contexts.ask(_req(rid), FollowsStored("stx-open", 0.2))
    begin, begun = contexts._open.begin, list[str]()

    def count(id_: str, *args: Any) -> None:
        begun.append(id_)
        begin(id_, *args)

    monkeypatch.setattr(contexts._open, "begin", count)
    for _ in range(2):
        contexts.keep(["running", *waiting])
        assert not any(contexts.opened(rid) for rid in waiting)
    assert begun == ["stx-open"] * 2
    contexts.keep(waiting)
    until(lambda: all(contexts.opened(rid) for rid in waiting))


@pytest.mark.parametrize("follows_next", ["stx-open", None])
def test_a_request_id_is_used_again(directories: list[Path], follows_next: str | None) -> None:
    """SGLang may plan no prefill between the end of a request and the next one with its id."""
    contexts = StoredContexts(
        Clusters(directories=tuple(directories)), GEOMETRY, 1000, TransferEngine(), ROPE
    )
    power = _power(contexts)

    def arrive(id_: str | None) -> Any:
        req = _req("a")
        req.to_finish = req.extra_key = None
        req.sampling_params.custom_params = {STORED: {"id": id_}} if id_ else {}
        power.arrive(req)
        return req

    first = arrive("stx-mine")
    until(lambda: contexts.opened("a"))
    follower, key = contexts.follower("a"), first.extra_key
    power.arrive(first)  # after a retraction
    assert contexts.follower("a") is follower
    assert first.extra_key == key
    contexts.given_up.add("a")
    second = arrive(follows_next)
    found = contexts.follower("a")
    assert (found.req if found else None) is (second if follows_next else None)
    assert (found.ids if found else None) == ((follows_next,) if follows_next else None)
    assert (second.extra_key or "").startswith(f"ext:stored:{follows_next}") == bool(follows_next)
    assert not contexts.given_up
    contexts.refuse("a", ExtError("it cannot be opened"))
    arrive(follows_next)
    assert not contexts.refused


def test_a_failed_context_is_closed_in_the_step_in_which_its_requests_have_ended(
    directories: list[Path],
) -> None:
    contexts = StoredContexts(
        Clusters(directories=tuple(directories)), GEOMETRY, 1000, TransferEngine(), ROPE
    )
    power = _power(contexts)
    nobody = SimpleNamespace(reqs=())
    power._scheduler = SimpleNamespace(
        waiting_queue=[], collect_inflight_reqs=list, chunked_req=None,
        grammar_manager=SimpleNamespace(grammar_queue=[]),
    )  # fmt: skip
    follower = contexts.ask(_req("a"), FollowsStored("stx-mine", 0.2))
    until(lambda: contexts.opened("a"))
    contexts.context(follower).failed = "it failed"
    power.before_step(nobody)
    assert len(contexts._open) == 0


def test_other_powers_forget_a_waiting_request_that_is_refused(directories: list[Path]) -> None:
    contexts = StoredContexts(
        Clusters(directories=tuple(directories)), GEOMETRY, 1000, TransferEngine(), ROPE
    )
    power, told = _power(contexts), list[object]()
    req = _req("a")
    req.set_finish_with_abort = lambda *_: told.append("aborted")
    contexts.ask(req, FollowsStored("stx-mine", 0.2))
    contexts.refuse("a", ExtError("it cannot be opened"))
    inner = SimpleNamespace(forget=lambda rid: told.append(rid))
    power._ext = SimpleNamespace(inside_out=[inner])
    power._scheduler = SimpleNamespace(waiting_queue=[req, _req("b")])
    power.before_step(SimpleNamespace())
    assert told == ["a", "aborted"]
