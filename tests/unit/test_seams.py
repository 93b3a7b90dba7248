"""Comparison of SGLang releases: what this package uses of one and another lacks."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from conftest import ROOT

from sgl_ext import SUPPORTED_SGLANG
from sgl_ext.engine.core.hooks import Hook

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "seams.py"))
POLICY = "sglang/srt/managers/schedule_policy.py"
OPTIONS = "sglang/srt/arg_groups/fields/memory.py"
RESOLUTION = "sglang/srt/arg_groups/overrides.py"
installed = SCRIPT["installed"]


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A release that has only three modules of the installed one, in which some lines differ."""
    changes = {
        POLICY: (
            ("def _commit_prefill_admission(", "def _other("),
            ("def add_one_req(", "def add_one_req(extra, "),
            ("class AddReqResult(", "class Result("),
            ("def _ceil_div(value: int, divisor: int)", "def _ceil_div(value: int)"),
        ),
        OPTIONS: (("enable_unified_cache_external_linker:", "enable_linker:"),),
        RESOLUTION: (),
    }
    for name, replaced in changes.items():
        text = (installed() / name).read_text()
        for before, after in replaced:
            assert before in text
            text = text.replace(before, after, 1)
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return tmp_path


@pytest.fixture(scope="module", params=SUPPORTED_SGLANG)
def supported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python files of a supported release; those that are not installed are downloaded."""
    if request.param == version("sglang"):
        return Path(installed())
    folder = tmp_path_factory.mktemp("release")
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
        "--timeout", "5", "--retries", "1", "--dest", str(folder), f"sglang=={request.param}",
    ]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=45)
    except subprocess.TimeoutExpired:
        pytest.skip(f"SGLang {request.param} cannot be downloaded: no answer within 45 s")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"SGLang {request.param} cannot be downloaded: {error.stderr.strip()[-200:]}")
    (wheel,) = folder.glob("*.whl")
    with ZipFile(wheel) as packed:
        packed.extractall(folder, [each for each in packed.namelist() if each.endswith(".py")])
    return folder


def findings(release: Path) -> list[Any]:
    return [each for check in SCRIPT["CHECKS"].values() for each in check(installed(), release)]


def test_the_installed_release_holds() -> None:
    assert findings(installed()) == []


@pytest.mark.slow
def test_every_supported_release_holds(supported: Path) -> None:
    assert [each for each in findings(supported) if each.fatal] == []


def test_functions_that_are_gone_or_differ_are_found(release: Path) -> None:
    moved = release / "sglang/srt/managers/moved.py"
    moved.write_text("class Other:\n    def run_batch(self): ...\n")
    found = {each.target: each for each in SCRIPT["changed_functions"](installed(), release)}
    adder = "sglang.srt.managers.schedule_policy.PrefillAdder"
    assert found[f"{adder}._commit_prefill_admission"].what == "is gone"
    assert "(extra, self, req" in found[f"{adder}.add_one_req"].what
    assert f"{adder}.preempt_to_schedule" not in found
    run_batch = found["sglang.srt.managers.scheduler.Scheduler.run_batch"]
    assert run_batch.fatal
    assert run_batch.what == "is gone; functions of this name: managers.moved:2"


@pytest.mark.parametrize(
    ("theirs", "passed"),
    [
        ("(self, a, b, d=0, *, c=0)", True),
        ("(self, a, b, *, c=0, e)", True),
        ("(self, a, *, c=0)", True),
        ("(self, b, a, *, c=0)", False),
        ("(self, a, b)", False),
    ],
)
def test_hooks_pass_on_the_parameters_that_they_do_not_name(theirs: str, passed: bool) -> None:
    """The functions below name the first two parameters, and ``c``."""

    def around(original: Any, owner: Any, a: int, *args: int, c: int = 0, **kw: int) -> None: ...

    def before(owner: Any, a: int, *args: int, c: int = 0, **kw: int) -> None: ...

    def closed(owner: Any, a: int, b: int, *, c: int = 0) -> None: ...

    def definition(parameters: str) -> ast.stmt:
        return ast.parse(f"def function{parameters}: ...").body[0]

    mine = definition("(self, a, b, *, c=0)")
    for when, function in (("around", around), ("before", before)):
        hook = Hook("a.target", when, function, "a test")  # type: ignore[arg-type]
        assert SCRIPT["passes_on"](hook, mine, definition(theirs)) == passed
    hook = Hook("a.target", "before", closed, "a test")
    assert not SCRIPT["passes_on"](hook, mine, definition(theirs))


def test_imported_names_that_are_gone_are_found(release: Path) -> None:
    found = {each.target for each in SCRIPT["changed_names"](installed(), release)}
    policy = "sglang.srt.managers.schedule_policy"
    assert f"{policy}.AddReqResult" in found
    assert f"{policy}.CLIP_MAX_NEW_TOKENS" not in found
    assert "sglang.srt.environ.envs" in found


def test_arguments_that_are_gone_are_found(release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = ast.parse(
        "from sglang.srt.managers.schedule_policy import _ceil_div\n_ceil_div(value=1, divisor=2)"
    )
    check = SCRIPT["changed_names"]
    monkeypatch.setitem(check.__globals__, "sources", lambda: [source])
    (found,) = check(installed(), release)
    assert found.target == "sglang.srt.managers.schedule_policy._ceil_div"
    assert found.what == "has no parameter divisor"


def test_names_and_arguments_are_found_where_they_are_used() -> None:
    source = ast.parse(
        "from sglang.srt.managers import schedule_policy as policy\n"
        "def function():\n"
        "    from sglang.srt.managers.schedule_policy import PrefillAdder as Adder\n"
        "    Adder(page_size=1)\n"
        "    return policy.estimate(1, exact=True)\n"
    )
    found = {(use.name, *use.keywords) for use in SCRIPT["uses"](source, installed())}
    assert found == {
        ("schedule_policy",), ("PrefillAdder",), ("PrefillAdder", "page_size"),
        ("estimate",), ("estimate", "exact"),
    }  # fmt: skip


def test_members_that_are_gone_are_found(release: Path) -> None:
    found = {each.target for each in SCRIPT["changed_types"](installed(), release)}
    assert "Scheduler._release_aborted_request" in found
    assert not any(target.startswith("PrefillAdder.") for target in found)


def test_options_that_are_gone_are_found(release: Path) -> None:
    found = {each.target for each in SCRIPT["changed_options"](installed(), release)}
    assert "ServerArgs.enable_unified_cache_external_linker" in found
    assert "ServerArgs.radix_cache_backend" not in found
