"""A demonstration on real servers."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from sgl_ext.cli import app


def test_tiers_give_the_same_answer_sooner_than_computing() -> None:
    result = CliRunner().invoke(app, ["demo", "tiers", "--json"])
    assert result.exit_code == 0, result.stderr
    computed, host, ssd = json.loads(result.stdout)
    assert "fox" in computed["answer"]
    assert computed["answer"] == host["answer"] == ssd["answer"]
    assert "tokens host" in host["KV from"] and "tokens ssd" in ssd["KV from"]
