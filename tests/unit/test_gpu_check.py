"""The check of a GPU machine: its command line, its record, and a dry run on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import ROOT, until

sys.path.append(str(ROOT / "scripts"))
from gpu.check import parts
from gpu.check.equal import judge
from gpu.check.options import parse
from gpu.check.outcome import Outcome


def test_parts_run_in_the_order_of_the_command_line() -> None:
    assert parse(parts.PARTS, []).parts == list(parts.PARTS)
    assert parse(parts.PARTS, ["--parts", "peer,lanes"]).parts == ["peer", "lanes"]
    assert "bandwidth" not in parse(parts.PARTS, ["--no-bandwidth"]).parts


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["--parts", "lanes,lane"], "--parts lane: expected some of lanes"),
     (["--rounds", "0"], "--rounds 0: expected 1 or more")],
)  # fmt: skip
def test_wrong_arguments_are_named(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(parts.PARTS, arguments)
    assert expected in capsys.readouterr().err


def test_an_outcome_is_on_disk_after_every_finding(tmp_path: Path) -> None:
    file = tmp_path / "part.json"
    outcome = Outcome(file)
    outcome.figure("ratio", 1.2, at_most=1.01)
    assert json.loads(file.read_text())["failed"] == ["ratio is 1.2, expected at most 1.01"]
    with outcome.step("broken"):
        raise ValueError("no memory")
    assert json.loads(file.read_text())["failed"][1] == "broken: ValueError: no memory"


def test_a_status_says_the_worst() -> None:
    outcome = Outcome(thresholds=False)
    outcome.lack("HiCache", "no kernels")
    assert outcome.status == "left out"
    outcome.figure("ratio", 2.0, at_least=8.0)
    assert outcome.status == "passed"
    outcome.refuse("tiers", "not on this device")
    assert outcome.status == "refused"
    outcome.fail("differs")
    assert outcome.status == "failed"


def answer(ids: list[int], gap: float = 1.0) -> dict[str, Any]:
    best = [[[0.0, token, None], [-gap, token + 1, None]] for token in ids]
    return {"output_ids": ids, "meta_info": {"output_top_logprobs": best}}


def test_only_answers_that_leave_a_clear_choice_differ() -> None:
    expected = [answer([1, 2]), answer([1, 2], gap=1e-5), answer([1, 2])]
    counts = judge(expected, [answer([1, 2]), answer([1, 7]), answer([1, 7])], tie=1e-3)
    assert (counts["equal"], counts["ties"], counts["different"]) == (1, 1, 1)
    assert counts["first"].startswith("the first one at token 1 of answer 2: 7, not 2")


def test_a_part_that_hangs_is_stopped_and_keeps_its_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "scripts" / "gpu_check.py"
    script.parent.mkdir()
    script.write_text(
        "import json, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "found = {'failed': [], 'figures': {'pid': child.pid}}\n"
        "open(sys.argv[-1], 'w').write(json.dumps(found))\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    options = parse(parts.PARTS, ["--out", str(tmp_path)])
    begin = time.monotonic()
    found = parts.run_apart("lanes", options, 3.0)
    assert time.monotonic() - begin < 60
    assert found["status"] == "no time"
    assert found["failed"] == ["stopped after 3 s"]
    pid = found["figures"]["pid"]
    until(lambda: not running(pid))


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_dry_run_measures_lanes_on_the_cpu(tmp_path: Path) -> None:
    result = subprocess.run(
        [ROOT / "scripts" / "gpu_check.sh", "--dry-run", "--parts", "lanes", "--out", tmp_path],
        env=os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    record = json.loads((tmp_path / "gpu_check.json").read_text())
    assert record["machine"]["gpu"] == "missing"
    part = record["parts"]["lanes"]
    assert (part["status"], part["refused"], part["lacking"]) == ("passed", {}, {})
    assert len(part["figures"]) == 6
    assert record["figures"] == part["figures"]
