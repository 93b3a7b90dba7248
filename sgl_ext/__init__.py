"""SGLang plugin that makes KV cache a resource of the whole machine.

Importing this package imports neither torch nor SGLang.
"""

from __future__ import annotations

__version__ = "0.1.0"

SUPPORTED_SGLANG = "0.5.23"
"""The only supported SGLang release: every hook and seam of this package is written for it."""
