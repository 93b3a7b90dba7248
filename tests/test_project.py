"""One version of each thing: package, constant and lock file agree."""

from __future__ import annotations

import tomllib

from conftest import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from skips import ALLOWED, unexpected

import sgl_ext

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = {
    canonicalize_name(requirement.name): str(requirement.specifier).removeprefix("==")
    for requirement in map(
        Requirement,
        (
            line
            for line in (ROOT / "scripts" / "cpu.lock").read_text().splitlines()
            if line and not line.startswith("#")
        ),
    )
}


def test_versions_agree() -> None:
    assert PROJECT["version"] == sgl_ext.__version__
    assert LOCK["sglang"] == sgl_ext.SUPPORTED_SGLANG
    assert PROJECT["optional-dependencies"]["cuda"] == [f"sglang=={sgl_ext.SUPPORTED_SGLANG}"]


def test_the_lock_resolves_what_the_package_asks_for() -> None:
    extras = PROJECT["optional-dependencies"]
    for line in [*PROJECT["dependencies"], *extras["cpu"], *extras["dev"]]:
        requirement = Requirement(line)
        locked = LOCK[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(locked), f"{line}: locked {locked}"


def test_no_cuda_package_is_locked() -> None:
    assert LOCK["torch"] == "2.13.0+cpu"
    cuda = {name for name in LOCK if name.startswith(("nvidia-", "cuda-", "flashinfer"))}
    assert cuda == {"nvidia-ml-py"}  # a binding that SGLang imports; it has no CUDA in it


def test_only_skips_with_a_reason_that_is_listed_pass_in_ci() -> None:
    reasons = ["Skipped: root writes anywhere", "Skipped: Mooncake is missing", "another"]
    assert unexpected(reasons) == ["Mooncake is missing", "another"]
    assert unexpected([f"Skipped: {reason}: 4096 B" for reason in ALLOWED]) == []
