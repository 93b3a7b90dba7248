"""Typed configuration: one section per power; a section that is absent is off.

The launcher reads ``--ext-config`` (a YAML or JSON file, or inline JSON) once, validates it as a
whole and passes it on unchanged. README.md in this package is the reference of all keys.
"""

from sgl_ext.config.chunks import Chunks
from sgl_ext.config.clusters import Clusters
from sgl_ext.config.memory import Memory
from sgl_ext.config.peer import Peer
from sgl_ext.config.restore import Restore
from sgl_ext.config.swap import Swap, SwapExperiment
from sgl_ext.config.tiers import HostTier, RemoteTier, SsdTier, Tiers
from sgl_ext.config.whole import EXAMPLES, SECTIONS, ExtConfig, load

__all__ = [
    "EXAMPLES",
    "SECTIONS",
    "Chunks",
    "Clusters",
    "ExtConfig",
    "HostTier",
    "Memory",
    "Peer",
    "RemoteTier",
    "Restore",
    "SsdTier",
    "Swap",
    "SwapExperiment",
    "Tiers",
    "load",
]
