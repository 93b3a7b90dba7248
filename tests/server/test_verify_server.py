"""``sgl-ext verify`` on real servers: a right one, planted faults, and stock SGLang."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import POOL
from typer.testing import CliRunner

from sgl_ext.cli import app
from sgl_ext.serving.server import Server, System, serve

PLANTED = Path(__file__).parent / "planted"


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder whose files switch faults of the server on."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def server(
    model: Path, logs: Path, faults: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    ssd = {
        "directories": [str(tmp_path_factory.mktemp("ssd"))], "capacity": "128MiB", "keep_after": 1,
    }  # fmt: skip
    config = {
        "tiers": {"host": {"capacity": "128MiB"}, "ssd": ssd}, "chunks": {},
        "swap": {"capacity": "64MiB", "policy": "static"},
    }  # fmt: skip
    arguments = (
        "--max-total-tokens", "2048", "--page-size", "16", "--dtype", "float32",
        "--enable-ext", "--ext-config", json.dumps(config),
    )  # fmt: skip
    environment = {"PYTHONPATH": str(PLANTED), "SGLEXT_PLANTED": str(faults)}
    with serve([System("verified", arguments, environment)], model, logs) as (running,):
        yield running


def verify(server: Server, *arguments: str) -> tuple[bool, dict[str, dict[str, Any]]]:
    """Returns whether the server was found to be right, and the lines of the report by step."""
    options = ("--passages", "2", "--length", "256", "--json")
    result = CliRunner().invoke(app, ["verify", server.url, *options, *arguments])
    report = json.loads(result.stdout)
    assert result.exit_code == (0 if report["same"] else 1)
    return report["same"], {line["step"]: line for line in report["lines"]}


def test_a_right_server_is_right_from_every_tier(server: Server) -> None:
    same, lines = verify(server)
    assert same, lines
    assert lines["cold"]["sources"].keys() == {"computed"}
    assert lines["warm"]["sources"]["device"] > 400
    assert lines["evicted"]["sources"]["host"] > 400
    assert lines["flushed"]["sources"]["ssd"] > 400
    assert lines["preempted"]["verdict"] == "same"
    assert "2 of 2 were resumed" in lines["preempted"]["found"]
    assert "0." in lines["chunks"]["found"]


@pytest.mark.parametrize(
    ("fault", "step"), [("page", "flushed"), ("copy", "evicted"), ("resumed", "preempted")]
)
def test_a_wrong_page_is_found_where_it_is_loaded(
    server: Server, faults: Path, fault: str, step: str
) -> None:
    (faults / fault).touch()
    try:
        same, lines = verify(server)
    finally:
        (faults / fault).unlink()
    assert not same
    assert [name for name, line in lines.items() if line["verdict"] == "differs"][:1] == [step]
    if step != "preempted":
        assert "nats around token" in lines[step]["found"]


def test_a_wrong_attention_is_found_by_another_server(
    server: Server, faults: Path, model: Path, logs: Path
) -> None:
    arguments = (*POOL, "--dtype", "float32")
    with serve([System("right", arguments)], model, logs) as (right,):
        assert verify(server, "--against", right.url, "--no-flush")[0]
        (faults / "attention").touch()
        try:
            same, lines = verify(server, "--against", right.url, "--no-flush")
        finally:
            (faults / "attention").unlink()
        assert not same
        assert lines[f"against {right.url}"]["verdict"] == "differs"
        same, lines = verify(right, "--no-flush")
    assert same
    assert lines["server"]["verdict"] == "note"
    assert "without sgl_ext" in lines["server"]["found"]
    assert lines["warm"]["verdict"] == lines["all at once"]["verdict"] == "same"
