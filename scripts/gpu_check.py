"""Checks this package on a machine with a GPU; see ``gpu/check``."""

from __future__ import annotations

import sys
from pathlib import Path

# Not implied where PYTHONSAFEPATH is set.
sys.path.insert(0, str(Path(__file__).resolve().parent))

if __name__ == "__main__":
    from gpu.check.main import main

    sys.exit(main())
