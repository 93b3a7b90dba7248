"""Options, device, folders and sizes that all parts of the check share."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Setup:
    """Machine and options of a run."""

    options: argparse.Namespace
    out: Path
    """Folder of logs, models and scratch files."""
    cuda: bool
    """Whether servers run on a GPU; otherwise on the CPU platform of this package."""
    stand_in: bool
    """Whether SGLang's compiled kernels are replaced by those of ``scripts/gpu/sgl_kernel``."""

    @property
    def dry(self) -> bool:
        """Whether sizes are tiny and thresholds are not applied."""
        return bool(self.options.dry_run)

    def scale(self, full: int, dry: int) -> int:
        """Returns a size for this run."""
        return dry if self.dry else full

    def folder(self, name: str) -> Path:
        """Returns a folder of this run, private to the user."""
        path = self.out / name
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path
