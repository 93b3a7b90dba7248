"""Commands ``sgl-ext doctor`` and ``sgl-ext describe``, and the checks before a start."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from typer.testing import CliRunner

from sgl_ext import doctor, preflight
from sgl_ext.cli import app
from sgl_ext.config import SECTIONS, load
from sgl_ext.engine.core import served
from sgl_ext.engine.cpu import platform as cpu
from sgl_ext.errors import ExtError
from sgl_ext.memory import mapping
from sgl_ext.memory.slab import Layout
from sgl_ext.peer import directory
from sgl_ext.planning.compute_cost import ComputeCost
from sgl_ext.planning.profile import PROFILES, VERSION, Profile, Subject, save
from sgl_ext.tiers.arena import Arena, stride_of


@pytest.fixture(scope="module")
def hooks_check() -> preflight.Check:
    return doctor._hooks()


@pytest.fixture(autouse=True)
def _once(monkeypatch: pytest.MonkeyPatch, hooks_check: preflight.Check) -> None:
    """Reuses one real result of the hooks check, which imports SGLang and takes seconds."""
    monkeypatch.setattr(doctor, "_hooks", lambda: hooks_check)


def test_this_machine_runs_the_default_configuration() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == 0, result.stdout
    assert report["would_run"] is True
    names = [check["name"] for check in report["checks"]]
    assert {"Python", "torch", "SGLang", "accelerator", "hooks", "huge pages", "native parts",
            "io_uring", "shared memory", *SECTIONS} <= set(names)  # fmt: skip
    hooks = next(check for check in report["checks"] if check["name"] == "hooks")
    assert hooks["found"] == (
        "all hooked SGLang functions and required extension points are present; "
        "platform NativeCpuPlatform"
    )


@pytest.mark.parametrize("found", ["cuda", "rocm"])
def test_sections_that_are_not_implemented_for_the_accelerator_fail_the_check(
    found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "accelerator_name", lambda: found)
    clusters = {"directories": ["/tmp"]}
    both = load({"tiers": {"host": {"capacity": "1MiB"}}, "clusters": clusters})
    check = doctor._accelerator(both)
    assert (check.verdict, check.found) == (
        "fail", f"{found}; not served on it: tiers, clusters",
    )  # fmt: skip
    ready = served.READY.get(found, ())
    for name in ("tiers", "clusters"):
        why = "only been run on a simulated device" if name in ready else "not implemented"
        assert f"{name} " in check.todo
        assert why in check.todo
    assert doctor._accelerator(load({})).verdict == "ok"
    monkeypatch.setenv("SGLANG_PLATFORM", "sgl_ext_cpu")
    assert doctor._accelerator(both).verdict == "ok"


def test_a_missing_directory_fails_the_check(tmp_path: Path) -> None:
    config = {"clusters": {"directories": [str(tmp_path), "/nope"]}}
    result = CliRunner().invoke(app, ["doctor", "--config", json.dumps(config)])
    assert result.exit_code == 1
    assert "would not run" in result.stdout
    verdicts = {check.name: check for check in doctor.examine(load(config))}
    assert verdicts["clusters"].verdict == "ok"
    assert verdicts[f"clusters directory {tmp_path}"].verdict in ("ok", "note")
    assert verdicts["clusters directory /nope"].found == "does not exist"
    assert verdicts["clusters directory /nope"].verdict == "fail"
    assert list(tmp_path.iterdir()) == []


def test_usable_tiers_pass_the_checks(tmp_path: Path) -> None:
    ssd = {"directories": [str(tmp_path)], "capacity": "1MiB"}
    checks = doctor.examine(load({"tiers": {"ssd": ssd, "host": {"capacity": "1MiB"}}}))
    assert doctor.would_run(checks)
    assert {check.name: check for check in checks}["tiers"].found == "on"


def test_capacities_that_do_not_fit_are_named(tmp_path: Path) -> None:
    ssd = {"directories": [str(tmp_path)], "capacity": "4000TiB"}
    config = load({"tiers": {"ssd": ssd}, "swap": {"capacity": "4000TiB"}})
    verdicts = {check.name: check for check in doctor.examine(config)}
    assert "on a disk of" in verdicts[f"tiers directory {tmp_path}"].found
    assert "requested" in verdicts["host memory"].found
    assert verdicts["host memory"].todo == "lower swap.capacity and tiers.host.capacity"


def test_a_missing_or_outdated_cost_profile_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "cache_dir", lambda: tmp_path)
    config = load({"tiers": {"host": {"capacity": "1MiB"}}, "restore": {}})

    def profiles() -> preflight.Check:
        (found,) = (each for each in doctor.examine(config) if each.name == "cost profile")
        return found

    def noted() -> bool:
        return profiles().verdict == "note"

    assert noted()
    subject = Subject("model", "float32", 16, "device")
    path = save(Profile(subject, ComputeCost(), {}, {}), tmp_path / PROFILES)
    assert not noted()
    assert profiles().found == "measured with page size 16, float32, device"
    path.write_text(path.read_text().replace(f'"version": {VERSION}', '"version": 1'))
    assert noted()


@pytest.mark.parametrize("role", ["master", "worker"])
def test_a_peer_directory_must_be_private_and_have_one_master(tmp_path: Path, role: str) -> None:
    tmp_path.chmod(0o755)
    peer = {"role": role, "directory": str(tmp_path), "capacity": "1MiB"}
    with pytest.raises(ExtError, match=r"mode 0755.*: run chmod 700 on it"):
        preflight.require(load({"peer": peer}))
    tmp_path.chmod(0o700)
    preflight.require(load({"peer": peer}))
    with directory.lock(tmp_path):
        if role == "worker":
            return preflight.require(load({"peer": peer}))
        with pytest.raises(ExtError, match="already has a master"):
            preflight.require(load({"peer": peer}))
    return None


def test_a_peer_directory_that_cannot_be_created_fails_the_check(tmp_path: Path) -> None:
    def verdict(directory: Path) -> preflight.Check:
        config = load({"peer": {"role": "worker", "directory": str(directory)}})
        return list(preflight._sections(config))[-2]

    assert verdict(tmp_path / "a" / "b").found == "will be created"
    assert "too long for a socket" in verdict(tmp_path / ("d" * 300)).found
    (tmp_path / "file").touch()
    assert verdict(tmp_path / "file" / "b").found == f"cannot be created in {tmp_path}/file"
    assert not (tmp_path / "a").exists()
    ssd = {"directories": [str(tmp_path / ("d" * 300))]}
    with pytest.raises(ExtError, match="does not exist: create it"):
        preflight.require(load({"clusters": ssd}))


def test_all_failures_are_reported_in_one_line(tmp_path: Path) -> None:
    ssd = {"directories": ["/nope"], "capacity": "1MiB"}
    config = load({"tiers": {"ssd": ssd, "host": {"capacity": "4000TiB"}}})
    with pytest.raises(ExtError) as refused:
        preflight.require(config)
    (line,) = str(refused.value).splitlines()
    assert "tiers directory /nope: does not exist: create it" in line
    assert "host memory: 4096000.0 GiB requested" in line
    assert line.endswith("lower tiers.host.capacity")


def test_an_arena_that_does_not_fit_names_the_option_to_lower() -> None:
    layout = Layout(16, 1 << 20, 1 << 10, 1 << 10, "float32", "")
    with pytest.raises(ExtError, match=r"lower tiers\.host\.capacity"):
        Arena(layout, 1 << 20)


def test_an_arena_leaves_room_for_the_kv_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(16, 1, 1, 64, "float32", "")
    size = 4 * stride_of(layout)
    monkeypatch.setattr(mapping, "available_memory", lambda: size + 1000)
    Arena(layout, 4, beside=1000)
    with pytest.raises(ExtError, match=r"needs [\d,]+ B of memory beside 1,001 B for the KV pool"):
        Arena(layout, 4, beside=1001)


def test_a_remote_client_that_cannot_be_loaded_fails_the_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remote = {"remote": {"master": "127.0.0.1:1"}}
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "unit" / "no_mooncake"))
    verdicts = {check.name: check for check in doctor.examine(load({"tiers": remote}))}
    assert verdicts["remote tier"].verdict == "fail"
    assert "libibverbs.so.1" in verdicts["remote tier"].found
    assert "apt-get install libibverbs1" in verdicts["remote tier"].todo


def test_the_directory_of_chunks_is_checked(tmp_path: Path) -> None:
    for place, found in ((tmp_path, "can be written"), (tmp_path / "none", "does not exist")):
        config = load({"chunks": {"directory": str(place)}})
        verdicts = {check.name: check for check in doctor.examine(config)}
        assert verdicts[f"chunks directory {place}"].found == found


def test_a_full_directory_of_chunks_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.posix_fallocate", full)
    config = load({"chunks": {"directory": str(tmp_path)}})
    (check,) = [each for each in doctor.examine(config) if each.name.startswith("chunks directory")]
    assert (check.verdict, check.found) == ("fail", "cannot be written: No space left on device")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("error", "verdict", "found"),
    [
        (errno.EINVAL, "note", "free, no O_DIRECT"),
        (errno.ENOSPC, "note", "full"),
        (errno.EIO, "fail", "cannot be written: Input/output error"),
    ],
)
def test_a_directory_of_ssds_is_written_to_with_direct_io(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, verdict: str, found: str
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(error, os.strerror(error))

    assert preflight._ssd_directory("clusters", tmp_path, 0).found.endswith("O_DIRECT")
    monkeypatch.setattr(os, "write", refuse)
    check = preflight._ssd_directory("clusters", tmp_path, 0)
    monkeypatch.undo()
    assert (check.verdict, check.found.endswith(found)) == (verdict, True)


@pytest.mark.skipif(os.getuid() == 0, reason="root writes anywhere")
def test_a_directory_that_is_not_writable_is_reported(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    config = load({"clusters": {"directories": [str(tmp_path)]}})
    verdicts = {check.name: check for check in doctor.examine(config)}
    assert verdicts[f"clusters directory {tmp_path}"].found == "not writable"


def test_another_sglang_version_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_sglang", lambda: "0.5.24")
    assert not doctor.would_run(doctor.examine(load(None)))


def test_an_excluded_plugin_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    for allowed, missing in (("sgl_ext", "sgl_ext_cpu"), ("x, sgl_ext_cpu", "sgl_ext")):
        monkeypatch.setenv("SGLANG_PLUGINS", allowed)
        verdicts = {check.name: check for check in doctor.examine(load(None))}
        assert verdicts["plugin"].verdict == "fail"
        assert verdicts["plugin"].found.endswith(f"excludes {missing}")
    monkeypatch.delenv("SGLANG_PLUGINS")
    monkeypatch.setenv("SGLANG_PLATFORM", "vendor")
    verdicts = {check.name: check for check in doctor.examine(load(None))}
    assert verdicts["plugin"].verdict == "fail"


def test_describe_prints_the_resolved_configuration() -> None:
    result = CliRunner().invoke(app, ["describe", "--config", '{"start_deadline": "2min"}'])
    assert yaml.safe_load(result.stdout) == load({"start_deadline": 120}).resolved()


def test_an_invalid_configuration_gives_one_line_and_exit_code_2() -> None:
    for command in ("describe", "doctor"):
        result = CliRunner().invoke(app, [command, "--config", '{"teirs": {}}'])
        assert result.exit_code == 2
        assert result.stderr.startswith("sgl_ext: ")
        assert len(result.stderr.splitlines()) == 1
