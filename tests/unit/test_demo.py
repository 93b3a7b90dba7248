"""Demonstrations: their columns and the command's table."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from sgl_ext.cli import app
from sgl_ext.config import SECTIONS
from sgl_ext.demo import powers
from sgl_ext.demo.side import Side, of_reply
from sgl_ext.verify.compare import Reply


def test_every_power_has_a_demonstration() -> None:
    assert {*powers.DEMOS} == {*SECTIONS}


def test_a_column_says_where_kv_came_from() -> None:
    entry = {"power": "clusters", "tokens": 701, "sparsity": 0.1}
    reply = Reply(" under the oak.\n\nMore", (1,), (), 2013, {"ssd": 2000}, (entry,), 0.256)
    side = of_reply("loaded", reply)
    assert side.seconds == 0.256
    assert side.rows == {
        "first token": "0.26 s",
        "KV from": "2,000 tokens ssd\n13 tokens computed\n701 tokens stored, 10% read",
        "answer": "under the oak.",
    }


def test_the_table_compares_the_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown() -> Iterator[Side]:
        yield Side("before", {"first token": "2.00 s", "answer": "[one]"}, 2.0)
        yield Side("after", {"first token": "0.50 s"}, 0.5)

    monkeypatch.setitem(powers.DEMOS, "tiers", shown)
    table = CliRunner().invoke(app, ["demo", "tiers"]).stdout
    assert "4.0 times as fast" in table and "[one]" in table
    found = json.loads(CliRunner().invoke(app, ["demo", "tiers", "--json"]).stdout)
    assert [each["title"] for each in found] == ["before", "after"]
    assert found[1]["seconds"] == 0.5


def test_an_unknown_power_is_named() -> None:
    result = CliRunner().invoke(app, ["demo", "other"])
    assert result.exit_code == 2
    assert "unknown power 'other'; choose one of tiers" in result.stderr
