"""Files of stored contexts that are read, changed and written again with digests that are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from sgl_ext.clusters import arrays


def planted(path: Path, text: bytes, content: arrays.Arrays) -> None:
    """Writes a file whose digests are right, whatever its content."""
    content = {name: np.ascontiguousarray(array) for name, array in content.items()}
    header = {"version": arrays.VERSION, "about": msgspec.Raw(text)}
    header["digests"] = {name: arrays._digest(array) for name, array in content.items()}
    said = msgspec.json.encode(header).decode(errors="replace")
    save_file(content, path, {"sgl_ext": said, "digest": arrays._digest_of(said)})


def content_of(path: Path) -> tuple[dict[str, Any], arrays.Arrays]:
    """Returns the description and the arrays of a file without checking them."""
    with safe_open(path, framework="numpy") as file:
        said = json.loads(file.metadata()["sgl_ext"])
        return said["about"], {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
