"""Comparison of SGLang releases: hooked functions and used members that a release lacks."""

from __future__ import annotations

import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import ROOT

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "seams.py"))
POLICY = "sglang/srt/managers/schedule_policy.py"


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A release that has only one module of the installed one, in which some lines differ."""
    text = (installed() / POLICY).read_text()
    target = tmp_path / POLICY
    target.parent.mkdir(parents=True)
    text = text.replace("def _replay_len(", "def _other(")
    target.write_text(text.replace("def add_one_req(", "def add_one_req(extra, ", 1))
    return tmp_path


def installed() -> Path:
    spec = find_spec("sglang")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent.parent


def test_the_installed_release_holds() -> None:
    assert [*SCRIPT["changed_functions"](installed(), installed())] == []


def test_functions_that_are_gone_or_differ_are_found(release: Path) -> None:
    found = {each.target: each for each in SCRIPT["changed_functions"](installed(), release)}
    adder = "sglang.srt.managers.schedule_policy.PrefillAdder"
    assert found[f"{adder}._replay_len"].what == "is gone"
    assert "(extra, self, req" in found[f"{adder}.add_one_req"].what
    assert f"{adder}.preempt_to_schedule" not in found
    assert found["sglang.srt.managers.scheduler.Scheduler.run_batch"].fatal


def test_members_that_are_gone_are_found(release: Path) -> None:
    found = {each.target for each in SCRIPT["changed_types"](installed(), release)}
    assert "Scheduler.send_abort_output" in found
    assert not any(target.startswith("PrefillAdder.") for target in found)
