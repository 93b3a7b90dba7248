"""Tests of the project's metadata: versions, lock files, and reasons of skipped tests."""

from __future__ import annotations

import re
import runpy
import tomllib

from conftest import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from skips import ALLOWED, unexpected

import sgl_ext

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCRIPTS = ROOT / "scripts"
PINS = "".join((SCRIPTS / f"{name}.lock").read_text() for name in ("cpu", "torch"))
LOCK = {
    canonicalize_name(name): version
    for name, version in re.findall(r"^([\w.-]+)==([^\s\\]+)", PINS, re.MULTILINE)
}


def test_versions_agree() -> None:
    assert PROJECT["version"] == sgl_ext.__version__
    newest = sgl_ext.SUPPORTED_SGLANG[-1]
    assert newest == max(sgl_ext.SUPPORTED_SGLANG, key=Version)
    assert LOCK["sglang"] == newest
    assert PROJECT["optional-dependencies"]["cuda"] == [f"sglang=={newest}"]


def test_locked_versions_satisfy_the_requirements() -> None:
    extras = PROJECT["optional-dependencies"]
    for line in [*PROJECT["dependencies"], *extras["cpu"], *extras["dev"]]:
        requirement = Requirement(line)
        locked = LOCK[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(locked), f"{line}: locked {locked}"


def test_no_cuda_package_is_locked() -> None:
    assert LOCK["torch"] == "2.13.0+cpu"
    cuda = {name for name in LOCK if name.startswith(("nvidia-", "cuda-", "flashinfer"))}
    assert cuda == {"nvidia-ml-py"}  # a binding that SGLang imports; it contains no CUDA


def test_only_listed_reasons_for_skips_pass_in_ci() -> None:
    reasons = ["Skipped: root writes anywhere", "Skipped: Mooncake is missing", "another"]
    assert unexpected(reasons) == ["Mooncake is missing", "another"]
    assert unexpected([f"Skipped: {reason}: 4096 B" for reason in ALLOWED]) == []


def test_every_pin_but_torch_has_hashes() -> None:
    text = (SCRIPTS / "cpu.lock").read_text()
    pins = re.findall(r"^([\w.-]+)==\S+((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", text, re.M)
    assert len(pins) == len(LOCK) - 1
    assert len(pins) == text.count("==")
    assert "--require-hashes" in (SCRIPTS / "setup.sh").read_text()


def test_the_lock_includes_only_files_for_linux_and_its_python() -> None:
    lock = runpy.run_path(str(SCRIPTS / "lock.py"))
    wanted = lock["tags"]()
    names = {
        "a_b-1.0-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl": True,
        "a_b-1.0-cp311-cp311-manylinux_2_28_aarch64.whl": True,
        "a_b-1.0-cp39-abi3-manylinux2014_aarch64.whl": True,
        "a_b-1.0-py3-none-any.whl": True,
        "a_b-1.0.tar.gz": True,
        "a_b-1.0.1.tar.gz": False,
        "a_b-1.0.1-py3-none-any.whl": False,
        "a_b-1.0-cp312-cp312-manylinux_2_28_x86_64.whl": False,
        "a_b-1.0-cp311-cp311-macosx_11_0_arm64.whl": False,
        "a_b-1.0-cp311-cp311-musllinux_1_2_x86_64.whl": False,
    }
    assert {name: lock["installable"](name, "1.0", wanted) for name in names} == names
