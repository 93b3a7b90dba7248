"""SGLang plugin that makes KV cache a resource of the whole machine.

Importing this package imports neither torch nor SGLang.
"""

from __future__ import annotations

__version__ = "0.1.0"

SUPPORTED_SGLANG = ("0.5.22", "0.5.23")
"""Supported SGLang releases, the newest one last. All hooks and seams fit each of them."""
