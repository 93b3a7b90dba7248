"""Makes torchvision's Python part importable beside the CPU build of torch.

SGLang imports torchvision for image models while it starts, whatever the model. The registry
has torchvision only as a CUDA build: beside a CPU torch its operator library cannot load, and
its registration code then fails because two operators have no schema. This module declares
those two schemas, and nothing else: no kernel is supplied, a model that calls one of them gets
torch's own "not implemented" error.

The declaration must come before the first ``import torchvision``, which ``import sglang`` and
every spawned SGLang process may do before any plugin is loaded. ``python -m`` this module
therefore writes one ``.pth`` line into the environment it runs in; that line, run at interpreter
start, only puts :class:`_Finder` on ``sys.meta_path``. Nothing is imported until torchvision is.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

PTH_NAME = "sgl_ext_torchvision_bridge.pth"

_MISSING_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_library: object | None = None


def declare_operators() -> None:
    """Declares the schemas torchvision's registration expects, unless CUDA builds bring them."""
    global _library
    import torch

    if _library is not None or torch.version.cuda is not None:
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in _MISSING_OPERATORS:
        library.define(name + _SCHEMA)
    _library = library  # the declarations live as long as this object


class _Finder(MetaPathFinder):
    """Declares the operators at the first import of torchvision, then steps aside."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            declare_operators()
        return None


def install() -> None:
    """Called by the ``.pth`` line at interpreter start."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def write_pth(directory: Path | None = None) -> Path:
    """Writes the ``.pth`` line into ``directory`` (default: this environment's site-packages)."""
    path = (directory or Path(sysconfig.get_paths()["purelib"])) / PTH_NAME
    path.write_text(
        "import importlib.util as u; "
        "u.find_spec('sgl_ext') and "
        "__import__('sgl_ext.engine.cpu.torchvision_bridge', fromlist=['install']).install()\n"
    )
    return path


if __name__ == "__main__":
    print(f"wrote {write_pth()}")
