"""Hardware and packages of the machine; paths and environment variables of the check."""

from __future__ import annotations

import ctypes.util
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
CARRIED = ROOT / "build" / "carry"
"""Archives that ``scripts/gpu/carry.sh`` makes for machines without a package registry."""
SITE = ROOT / "build" / "gpu" / "site"
"""Packages of the archives, and this package as ``--build`` makes it."""
_STAND_IN = ROOT / "scripts" / "gpu"
_TREE, _TREE_TORCH = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", (2, 13)
"""SGLang's choice of a radix tree, and the first version of torch that the compiled one of SGLang
0.5.23's wheel works with; it panics with earlier ones."""
_NATIVE = ("_transfer", "_attention", "_rotation", "_clusters")
_PACKAGES = (
    "torch", "triton", "transformers", "numpy", "sglang", "sglang-kernel", "flashinfer-python",
    "sgl-ext", "nanobind", "scikit-build-core", "gguf", "psutil", "requests",
)  # fmt: skip


def prepare(*, build: bool) -> None:
    """Unpacks what was carried, builds this package if asked to, and sets paths and variables."""
    unpack()
    if build:
        build_package()
    if (SITE / "sgl_ext").is_dir():
        # The compiled modules are those of the archive or the build, the Python files those here.
        shutil.copytree(
            ROOT / "sgl_ext", SITE / "sgl_ext", dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )  # fmt: skip
    set_paths()


def unpack() -> None:
    """Unpacks carried archives of packages for this Python, unless it was done before."""
    python = "cp{}{}".format(*sys.version_info)
    for archive in sorted(CARRIED.glob(f"*/{python}*.tar.gz")):
        stamp = SITE / f".{archive.name}.stamp"
        stated = str(archive.stat().st_size)
        if stamp.exists() and stamp.read_text() == stated:
            continue
        print(f"unpacking {archive.relative_to(ROOT)}", flush=True)
        SITE.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as tar:
            tar.extractall(SITE, filter="data")
        stamp.write_text(stated)


def build_package() -> None:
    """Builds this package with its compiled modules for this Python, without network access.

    Raises:
        subprocess.CalledProcessError: the build failed; its output was printed.
    """
    print("building this package", flush=True)
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps",
        "--no-build-isolation", "--upgrade", "--target", str(SITE), str(ROOT),
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=300)


def set_paths() -> None:
    """Sets ``sys.path`` and the variables of this process and of those that it starts."""
    paths = [SITE] if SITE.is_dir() else []
    sys.path[:0] = [str(path) for path in paths]
    if find_spec("sgl_kernel") is None:
        paths.append(_STAND_IN)
        os.environ.setdefault("SGLANG_FORCE_FUSED_OP_BACKEND", "torch")
        os.environ.setdefault("SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK", "1")
        sys.path.append(str(_STAND_IN))
    if _torch() < _TREE_TORCH:
        os.environ.setdefault(_TREE, "python")
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, paths), *filter(None, given)])
    # Servers are started in any folder: this one has a package of the same name.
    os.environ["PYTHONSAFEPATH"] = "1"
    # Here powers that were only run on a simulated device are tried on a real one.
    os.environ.setdefault("SGLEXT_UNTRIED", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Triton rounds float32 to TF32 in matrix products otherwise, in other ways in other batches.
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    _set_openssl()
    sys.path[len(sys.path) :] = [str(ROOT / "kernels" / "triton"), str(ROOT)]


def _set_openssl() -> None:
    """Lets compilers find the carried headers of OpenSSL, which SGLang's hash of pages needs."""
    headers = SITE / ".openssl"
    if Path("/usr/include/openssl/sha.h").exists() or not headers.is_dir():
        return
    found = ctypes.util.find_library("crypto")
    if found is None:
        return
    folders = (Path(folder) for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/lib64"))
    library = next((folder / found for folder in folders if (folder / found).exists()), None)
    link = headers / "libcrypto.so"
    if library is not None and not link.exists():
        link.symlink_to(library)
    for name in ("CPATH", "LIBRARY_PATH"):
        given = filter(None, [os.environ.get(name)])
        os.environ[name] = os.pathsep.join([str(headers), *given])


def stand_in() -> bool:
    """Returns whether ``sgl_kernel`` is the stand-in of this repository."""
    spec = find_spec("sgl_kernel")
    return spec is not None and Path(str(spec.origin)).is_relative_to(_STAND_IN)


def describe() -> dict[str, Any]:
    """Returns versions and hardware by name; ``missing`` where there is none."""
    found: dict[str, Any] = {"python": platform.python_version()}
    found |= {name: _version(name) for name in _PACKAGES}
    if stand_in():
        found["sglang-kernel"] = "stand-in"
    found |= {name: shutil.which(name) or "missing" for name in ("nvcc", "cmake", "ninja", "c++")}
    if found["nvcc"] != "missing":
        found["nvcc"] = _output(["nvcc", "--version"]).strip().rpartition("\n")[2]
    found["radix tree"] = os.environ.get(_TREE, "SGLang's default")
    found["compiled modules"] = _natives()
    found["cores"] = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found["host memory"] = f"{memory >> 30} GiB"
    found["kernel"] = platform.release()
    return found | _gpu()


def _gpu() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {"gpu": "missing"}
    device = torch.cuda.current_device()
    free, total = torch.cuda.mem_get_info(device)
    return {
        "gpu": torch.cuda.get_device_name(device),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "cuda": torch.version.cuda,
        "gpu memory": f"{free >> 30} of {total >> 30} GiB free",
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _torch() -> tuple[int, ...]:
    return tuple(int(part) for part in _version("torch").split(".")[:2] if part.isdigit())


def _natives() -> str:
    """Returns where the compiled modules are, or why they cannot be imported."""
    lines = "; ".join(f"import sgl_ext._native.{name} as found" for name in _NATIVE)
    command = [sys.executable, "-c", f"{lines}; print(found.__file__)"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if found.returncode:
        return f"missing: {found.stderr.strip().rpartition(chr(10))[2]} (--build makes them)"
    return str(Path(found.stdout.strip()).parent)


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
