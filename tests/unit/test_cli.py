"""Command line ``sgl-ext``: starters, and contexts, stored contexts and caches of a server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from sgl_ext import SUPPORTED_SGLANG
from sgl_ext.cli import app
from sgl_ext.cli.starters import STARTERS, starter
from sgl_ext.config import load
from sgl_ext.errors import ExtError

CONTEXT = {
    "id": "ctx-1", "tokens": 700, "bytes": 1 << 20, "method": "lego-16", "expires_in": None,
    "pinned": False,
}  # fmt: skip
RESTORED = {"interrupted": 4, "prompts": 2, "tokens": {}}
STORED = {"id": "stx-1", "tokens": 701, "bytes": 1 << 21, "index_bytes": 7, "model": "m"}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments])


@pytest.mark.parametrize("use", STARTERS)
def test_starters_are_valid_configurations(use: str, tmp_path: Path) -> None:
    file = tmp_path / "ext.yaml"
    result = run("init", use, "--out", str(file))
    assert result.exit_code == 0, result.stderr
    config = load(file)
    assert config.sections()
    again = run("init", use, "--out", str(file))
    assert again.exit_code == 1 and "exists already" in again.stderr
    assert config.tiers is None or config.tiers.ssd is None


@pytest.mark.parametrize("name", ["plain", "a, b: [c] #{d} 'e\"", "ü😀"])
def test_starters_name_the_directories_on_ssds(name: str, tmp_path: Path) -> None:
    folders = [tmp_path / name, tmp_path / "second"]
    for each in folders:
        each.mkdir()
    for use in ("chat", "rag", "agents"):
        file = tmp_path / f"{use}.yaml"
        file.write_text(starter(use, folders))
        config = load(file)
        assert config.tiers is not None and config.tiers.ssd is not None
        assert [*config.tiers.ssd.directories] == folders
        assert (config.restore is not None) == (use != "rag")
        assert (config.clusters is not None) == (use == "rag")


def test_starters_are_printed_as_json(tmp_path: Path) -> None:
    found = run("init", "rag", "--directory", str(tmp_path), "--json")
    assert load(json.loads(found.stdout)) == load(yaml.safe_load(starter("rag", [tmp_path])))


def test_starters_refuse_directories_that_they_cannot_use(tmp_path: Path) -> None:
    with pytest.raises(ExtError, match=r"^not a directory: .*missing; create each"):
        starter("chat", [tmp_path / "missing"])
    with pytest.raises(ExtError, match="given twice"):
        starter("chat", [tmp_path, tmp_path])
    with pytest.raises(ExtError, match="stores no KV on SSDs"):
        starter("overload", [tmp_path])
    assert run("init", "chat", "--directory", str(tmp_path / "missing")).exit_code == 1
    assert "unknown use 'other'; choose one of chat, rag" in run("init", "other").stderr


def test_version_is_an_option() -> None:
    assert f"SGLang {' and '.join(SUPPORTED_SGLANG)}\n" in run("--version").stdout


class Handler(BaseHTTPRequestHandler):
    """Answers as the routes of contexts do, and notes what was asked."""

    asked: list[tuple[str, str, Any]] = []  # noqa: RUF012

    def do_POST(self) -> None:
        size = int(self.headers.get("content-length") or 0)
        body = json.loads(self.rfile.read(size)) if size else None
        self.asked.append(("POST", self.path, body))
        name = self.path.partition("?")[0]
        if "gone" in name:
            self.send_error(404)
            return
        if name.endswith(("/pin", "/unpin")):
            changed = {**CONTEXT, "pinned": name.endswith("/pin")}
            if "full" in name:
                changed["warning"] = "no room for its KV"
            self._send("application/json", json.dumps(changed))
            return
        made: dict[str, Any] = {"contexts": [CONTEXT]} if "chunks" in self.path else STORED
        events = ({"progress": "1/2" if "chunks" in self.path else "layer 1/2"}, made)
        self._send("text/event-stream", "".join(f"data: {json.dumps(e)}\n\n" for e in events))

    def do_GET(self) -> None:
        self.asked.append(("GET", self.path, None))
        if self.path == "/server_info":
            live = {"sgl_ext": {"restore": RESTORED}}
            info = {"sgl_ext": {"version": "1"}, "internal_states": [live]}
            more = {"max_total_num_tokens": 1, "max_req_input_len": 1}
            self._send("application/json", json.dumps({**info, **more}))
            return
        stored = {"contexts": [STORED], "unreadable": {"stx-2": "a file is missing"}, "damaged": 1}
        found = {"contexts": [CONTEXT]} if "chunks" in self.path else stored
        self._send("application/json", json.dumps({**found, "storing": {"stx-3": "layer 3/30"}}))

    def do_DELETE(self) -> None:
        if self.headers.get("authorization") != "Bearer admin" and "guarded" in self.path:
            self.send_error(401)
            return
        self.asked.append(("DELETE", self.path, None))
        self._send("application/json", json.dumps({"deleted": "it"}))

    def log_message(self, *_: Any) -> None:
        """Logs nothing."""

    def _send(self, kind: str, text: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def url() -> Iterator[str]:
    Handler.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_contexts_are_created_listed_and_deleted(url: str, tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("a text")
    made = run("contexts", "create", str(file), "--url", url, "--split", "512", "--ttl", "60")
    assert made.exit_code == 0, made.stderr
    assert "ctx-1" in made.stdout and "never" in made.stdout
    (_, _, body) = Handler.asked[0]
    assert body == {
        "chunks": ["a text"], "ttl": 60.0, "split": {"by": "paragraph", "tokens": 512},
        "stream": True,
    }  # fmt: skip
    listed = run("contexts", "list", "--url", url, "--cache-salt", "s", "--json")
    assert json.loads(listed.stdout) == {"contexts": [CONTEXT]}
    assert run("contexts", "delete", "ctx-1", "--url", url).stdout == "deleted ctx-1\n"
    assert [path for _, path, _ in Handler.asked[1:]] == [
        "/ext/chunks/list?cache_salt=s", "/ext/chunks/ctx-1",
    ]  # fmt: skip


def test_contexts_are_pinned_and_unpinned(url: str) -> None:
    pinned = run("contexts", "pin", "ctx-1", "a/b", "--url", url)
    assert (pinned.exit_code, pinned.stdout) == (0, "pinned ctx-1\npinned a/b\n")
    assert run("contexts", "unpin", "ctx-1", "--url", url).stdout == "unpinned ctx-1\n"
    how = ("--url", url, "--cache-salt", "s", "--json")
    for act in ("pin", "unpin"):
        changed = run("contexts", act, "ctx-1", "ctx-1", *how)
        assert json.loads(changed.stdout) == {"contexts": [{**CONTEXT, "pinned": act == "pin"}] * 2}
    assert [path for _, path, _ in Handler.asked] == [
        "/ext/chunks/ctx-1/pin", "/ext/chunks/a%2Fb/pin", "/ext/chunks/ctx-1/unpin",
        *["/ext/chunks/ctx-1/pin?cache_salt=s"] * 2, *["/ext/chunks/ctx-1/unpin?cache_salt=s"] * 2,
    ]  # fmt: skip


def test_warnings_of_the_server_are_printed(url: str) -> None:
    partly = run("contexts", "pin", "ctx-1", "gone", "--url", url, "--json")
    assert partly.exit_code == 1
    assert len(json.loads(partly.stdout)["contexts"]) == 1
    pinned = run("contexts", "pin", "full", "--url", url, "--json")
    assert json.loads(pinned.stdout) == {"contexts": [{**CONTEXT, "pinned": True}]}
    assert pinned.stderr == "sgl_ext: no room for its KV\n"


@pytest.mark.parametrize("pinned", [True, False])
def test_pinned_contexts_are_marked_in_the_list(
    url: str, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONTEXT, "pinned", pinned)
    heading, row = run("contexts", "list", "--url", url).stdout.splitlines()
    assert heading.split()[-1] == "pinned"
    assert row.split()[-1] == ("yes" if pinned else "never")


def test_stored_contexts_are_stored_listed_and_deleted(url: str, tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("a text")
    assert run("store", str(file), "--url", url).stdout == "stx-1\n"
    assert json.loads(run("store", str(file), "--url", url, "--json").stdout)["tokens"] == 701
    listed = run("stored", "list", "--url", url)
    for word in ("stx-1", "2.0", "stx-2", "a file is missing", "stx-3", "layer 3/30"):
        assert word in listed.stdout
    assert "1 indexes cannot be read" in listed.stderr
    assert run("stored", "delete", "a/b", "--url", url).stdout == "deleted a/b\n"
    assert Handler.asked[-1][:2] == ("DELETE", "/ext/clusters/a%2Fb")


@pytest.mark.parametrize("group", ["contexts", "stored"])
def test_deleted_contexts_are_printed_as_json(url: str, group: str) -> None:
    found = run(group, "delete", "one", "guarded", "--url", url, "--json")
    assert found.exit_code == 1  # the second one needs another key
    assert json.loads(found.stdout) == {"deleted": ["one"]}


def test_stored_contexts_are_deleted_with_the_admin_key(url: str) -> None:
    delete = ("stored", "delete", "guarded", "--url", url)
    refused = run(*delete, "--api-key", "user")
    assert refused.exit_code == 1 and "admin API key" in refused.stderr
    both = ("--api-key", "user", "--admin-api-key", "admin")
    assert run(*delete, *both).stdout == "deleted guarded\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("contexts", "list"), ("stored", "list"), ("cache", "clear"), ("cache", "stat"),
        ("store", __file__), ("contexts", "create", __file__), ("cache", "warm", __file__),
        ("contexts", "pin", "ctx-1"), ("contexts", "unpin", "ctx-1"),
        ("top", "--once"), ("verify",),
    ],
)  # fmt: skip
def test_a_server_that_does_not_answer_is_named(arguments: tuple[str, ...]) -> None:
    nobody = "http://127.0.0.1:9"
    option = () if arguments[0] in ("verify", "top") else ("--url",)
    result = run(*arguments, *option, nobody)
    # verify tells answers that differ (1) from a verification that ended early (2).
    assert result.exit_code == (2 if arguments == ("verify",) else 1)
    assert result.stderr.startswith("sgl_ext: ")
    assert nobody in result.stderr


def test_top_shows_the_servers_that_answer_and_names_the_others(url: str) -> None:
    nobody = "http://127.0.0.1:9"
    both = run("top", nobody, url, "--once")
    assert both.exit_code == 1 and nobody in both.stderr
    assert "2 prompts restored" in both.stdout
    found = run("top", nobody, url, "--json")
    assert json.loads(found.stdout) == {url: {"restore": RESTORED}}
    refused = run("top", url)
    assert refused.exit_code == 2 and "add --once" in refused.stderr


def test_ids_are_whole_at_80_columns(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setitem(CONTEXT, "id", "ctx-" + 22 * "x")
    monkeypatch.setitem(CONTEXT, "bytes", 1 << 40)
    monkeypatch.setitem(CONTEXT, "method", "primed+offline-16")
    monkeypatch.setitem(STORED, "id", "a-name-of-sixty-characters-" + 33 * "x")
    monkeypatch.setitem(STORED, "bytes", 1 << 40)
    for group, context in (("contexts", CONTEXT), ("stored", STORED)):
        assert context["id"] in run(group, "list", "--url", url).stdout
