"""A wheel of the package, built from its source distribution, beside an existing SGLang."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import ROOT

_DEADLINE_S = 500
_NATIVE = {"_attention", "_clusters", "_rotation", "_transfer"}


def run(command: Sequence[str | Path], cwd: Path) -> subprocess.CompletedProcess[str]:
    found = subprocess.run(
        [*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=_DEADLINE_S,
        check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-4000:]
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the source distribution of the checkout, and a wheel from nothing but that."""
    into = tmp_path_factory.mktemp("wheel")
    build = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    run([sys.executable, "-c", build, into], ROOT)
    (source,) = into.glob("sgl_ext-*.tar.gz")
    with tarfile.open(source) as archive:
        names = archive.getnames()
        archive.extractall(into, filter="data")
    assert not [name for name in names if "/.venv" in name or "/build/" in name or ".so" in name]
    # Without optimization, which takes most of the time.
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps"]  # in an environment of pip's own
    folder = into / source.name.removesuffix(".tar.gz")
    run([*pip, "-C", "cmake.build-type=Debug", "--wheel-dir", into, folder], into)
    (found,) = into.glob("*.whl")
    return found


def test_the_wheel_has_the_package_and_its_native_parts(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    native = {Path(name).name.partition(".")[0] for name in names if name.endswith(".so")}
    assert native >= _NATIVE
    for name in ("sgl_ext/py.typed", "sgl_ext/plugin.py", "sgl_ext_kernels/__init__.py"):
        assert name in names
    top = {name.split("/")[0] for name in names}
    assert {each for each in top if not each.endswith(".dist-info")} == {
        "sgl_ext", "sgl_ext_kernels",
    }  # fmt: skip


def test_an_existing_sglang_serves_with_the_installed_wheel(
    wheel: Path, model: Path, tmp_path: Path
) -> None:
    # An environment with SGLang but not the checkout: it has the packages of the tests' environment
    # by their path, and so without the links to what is installed there as editable.
    run([sys.executable, "-m", "venv", "--without-pip", "venv"], tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    (packages,) = tmp_path.glob("venv/lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    run([*pip, "install", "--no-deps", wheel], tmp_path)
    check = subprocess.run(
        [*pip, "check"], capture_output=True, text=True, timeout=_DEADLINE_S, check=False
    )
    assert not [line for line in check.stdout.splitlines() if line.startswith("sgl-ext ")]
    run([python, "-m", "sgl_ext.engine.cpu.torchvision_bridge"], tmp_path)
    program = f"""
import json, sglang as sgl, sgl_ext
if __name__ == "__main__":
    engine = sgl.Engine(
        model_path={str(model)!r}, enable_ext=True, max_total_tokens=4096, log_level="error",
        ext_config={{"tiers": {{"host": {{"capacity": "64MiB"}}}}, "chunks": {{}}, "swap":
                    {{"capacity": "16MiB"}}}},
    )
    answer = engine.generate("The capital of France is", {{"temperature": 0, "max_new_tokens": 4}})
    state = engine.get_server_info()["internal_states"][0]["sgl_ext"]
    print(json.dumps([sgl_ext.__file__, answer["text"], [*state]]))
    engine.shutdown()
"""
    (tmp_path / "serve.py").write_text(program)
    found = run([python, "serve.py"], tmp_path).stdout.splitlines()[-1]
    assert str(packages) in found
    for power in ("tiers", "chunks", "swap"):
        assert f'"{power}"' in found
    cli = run([python.parent / "sgl-ext", "--version"], tmp_path)
    assert "0.1.0" in cli.stdout
