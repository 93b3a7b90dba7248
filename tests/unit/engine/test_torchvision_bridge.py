"""Tests of the bridge, which declares two schemas and no kernel before torchvision is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from sgl_ext.engine.cpu import torchvision_bridge


def python(program: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", program],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_torchvision_cannot_be_imported_without_the_bridge() -> None:
    finders = "[f for f in sys.meta_path if 'sgl_ext' not in type(f).__module__]"
    result = python(f"import sys; sys.meta_path[:] = {finders}; import torchvision")
    assert "operator torchvision::nms does not exist" in result.stderr


def test_torchvision_can_be_imported_with_the_bridge_but_has_no_kernel() -> None:
    result = python(
        "import torch, torchvision\n"
        "try:\n"
        "    torch.ops.torchvision.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)\n"
        "except NotImplementedError as error:\n"
        "    print(error)\n"
    )
    assert "Could not run 'torchvision::nms'" in result.stdout, result.stderr


def test_python_starts_without_importing_torch_or_torchvision() -> None:
    result = python("import sys; print({'torch', 'torchvision'} & set(sys.modules))")
    assert result.stdout.strip() == "set()"


def test_the_pth_line_is_harmless_without_the_package(tmp_path: Path) -> None:
    path = torchvision_bridge.write_pth(tmp_path)
    line = path.read_text()
    assert len(line.splitlines()) == 1
    assert line.startswith("import ")  # what makes Python run it
    result = python(line, "-I", "-S")  # no site-packages: no sgl_ext
    assert (result.returncode, result.stderr) == (0, "")
