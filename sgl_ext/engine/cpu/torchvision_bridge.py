"""Bridge that makes torchvision's Python part importable with the CPU build of torch.

SGLang imports torchvision for image models while it starts, whatever the model. The registry has
torchvision only as a CUDA build. With a CPU build of torch its operator library cannot load, and
its registration code then fails because two operators have no schema. This module declares these
two schemas and supplies no kernel: a model that calls one of them gets torch's own "not
implemented" error.

The declaration must come before the first ``import torchvision``, which ``import sglang`` and every
spawned SGLang process may do before any plugin is loaded. Running this module with ``python -m``
therefore writes one ``.pth`` line into its environment. That line, run at interpreter start, only
puts :class:`_Finder` on ``sys.meta_path``. Nothing is imported until torchvision is.
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
    """Declares the schemas that torchvision's registration expects, unless torch is a CUDA build.

    With CUDA builds, torchvision brings them itself.
    """
    global _library
    import torch

    if _library is not None or torch.version.cuda is not None:
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in _MISSING_OPERATORS:
        library.define(name + _SCHEMA)
    _library = library  # the declarations live as long as this object


class _Finder(MetaPathFinder):
    """Finder that declares the operators at the first import of torchvision, and removes itself."""

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
    """Puts the finder on ``sys.meta_path``; the ``.pth`` line calls it at interpreter start."""
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
