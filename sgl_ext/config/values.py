"""Types of the configuration's values: times, sizes, directories, shares.

Sizes are bytes or a string with a unit ("4GiB"); times are seconds or a string with a unit
("250ms").
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    PlainSerializer,
)

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def _seconds(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("expected a time such as '250ms', or seconds as a number")
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([a-z]+)\s*", value)
    if match is None or match[2] not in _SECONDS:
        raise ValueError(f"expected a time such as '250ms' (units {', '.join(_SECONDS)})")
    return float(match[1]) * _SECONDS[match[2]]


def _size(value: object) -> object:
    # pydantic reads only the beginning of a text, such as the 1 of 1,5GiB.
    written = not isinstance(value, str) or re.fullmatch(r"\s*\d*\.?\d+\s*[A-Za-z]+\s*", value)
    if isinstance(value, bool) or not written:
        raise ValueError("expected a size with a unit such as '4GiB', or bytes as a whole number")
    return value


def written_size(value: int) -> str:
    """Returns a size in bytes with the largest unit of which it is a multiple, such as ``4GiB``."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value % size == 0:
            return f"{value // size}{unit}"
    return f"{int(value)}B"


Seconds = Annotated[
    float,
    BeforeValidator(_seconds),
    Field(gt=0, le=1e9, allow_inf_nan=False),
    PlainSerializer(lambda seconds: f"{seconds:.12g}s"),
]
Bytes = Annotated[ByteSize, BeforeValidator(_size), Field(gt=0), PlainSerializer(written_size)]


def _distinct(directories: tuple[Path, ...]) -> tuple[Path, ...]:
    if Path() in directories:
        raise ValueError("a directory has an empty path; give its path, or remove it")
    try:
        resolved = [directory.expanduser().resolve() for directory in directories]
    except RuntimeError as error:
        raise ValueError(f"{error}; give the directory's whole path") from None
    if twice := sorted({str(path) for path in resolved if resolved.count(path) > 1}):
        raise ValueError(
            f"{', '.join(twice)}: the same directory is given twice; list each directory once"
        )
    return tuple(resolved)


def _named(directory: Path) -> Path:
    return _distinct((directory,))[0]


Directory = Annotated[Path, AfterValidator(_named)]
Directories = Annotated[tuple[Path, ...], Field(min_length=1), AfterValidator(_distinct)]


class Section(BaseModel):
    """Base class of the parts of the configuration; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


class EmulatedDevice(Section):
    """Slower device that an existing one emulates, for tests and benchmarks."""

    bytes_per_second: Bytes
    latency: Annotated[float, BeforeValidator(_seconds), Field(ge=0, le=10)] = 0.0
    """Latency of every read and write, in seconds."""
    operations_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Maximum number of reads and writes per second; None for no limit."""
