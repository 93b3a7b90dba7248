"""What computing and loading cost on one machine, measured once and kept in the user's cache."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from sgl_ext.config import Tiers
from sgl_ext.restore.costs import COMPUTE, CROSSOVER, ComputeCost, Costs, LoadCost

VERSION = 3
"""Of the file, and of what its figures mean."""

HOST = "host"
PROFILES = "profiles"
"""Folder of the user's cache."""
_LARGEST = 1 << 20
"""Bytes of a file that is read."""

logger = logging.getLogger(__name__)


Curve = dict[int, float]
"""Seconds, by tokens of the prefix."""


class Subject(msgspec.Struct, frozen=True):
    """What a profile is of."""

    model: str
    """Fingerprint of its weights."""
    dtype: str
    page: int
    device: str


class Profile(msgspec.Struct, frozen=True):
    """Measured costs; seconds."""

    subject: Subject
    compute: ComputeCost
    loads: dict[str, LoadCost]
    """By tier."""
    devices: dict[str, str]
    """What each tier was when it was measured; see :func:`devices`."""
    crossover: int = CROSSOVER
    """Tokens from which on restoring from host memory is faster by tokens than by layers: L_delta
    (§3.1)."""
    host: dict[str, Curve] = {}
    """Of restoring from host memory, by the strategy: what :attr:`crossover` was found by."""
    version: int = VERSION

    def costs(self, tiers: Mapping[str, str], chunk: int, host: str = "") -> Costs:
        """For restoring from these tiers.

        Args:
            tiers: what :func:`devices` says of those below host memory now; another device is not
                believed to be as fast.
            host: what it says of host memory.
        """
        known = {name for name in tiers if self.devices.get(name) == tiers[name]}
        known &= {*self.loads}
        if missing := sorted({*tiers} - known):
            logger.warning("the restore profile says nothing of %s; run sgl-ext calibrate", missing)
        loads = {name: self.loads[name] if name in known else LoadCost() for name in tiers}
        measured = frozenset({COMPUTE, *known})
        crossover = self.crossover if self.devices.get(HOST, "") == host else CROSSOVER
        return Costs(self.compute, loads, chunk, measured=measured, crossover=crossover)


def devices(tiers: Tiers) -> dict[str, str]:
    """What decides how fast each tier is, as far as the configuration tells."""
    found = {}
    if tiers.host is not None:
        found[HOST] = tiers.host.model_dump_json(include={"emulate", "link"})
    if tiers.ssd is not None:
        found["ssd"] = tiers.ssd.model_dump_json(include={"directories", "emulate"})
    if tiers.remote is not None:
        found["remote"] = tiers.remote.model_dump_json(include={"master", "host"})
    return found


def path_of(subject: Subject, directory: Path) -> Path:
    """Where its profile lies."""
    digest = hashlib.sha256(msgspec.json.encode(subject)).hexdigest()[:16]
    return directory / f"{digest}.json"


def find(subject: Subject, directory: Path) -> Profile | None:
    """The profile of ``subject``; None if there is none that can be used, which the log notes."""
    path = path_of(subject, directory)
    try:
        found = _read(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s is no restore profile (%s); run sgl-ext calibrate again", path, error)
        return None
    if found.version != VERSION or found.subject != subject:
        logger.warning(
            "%s is a restore profile of version %d of %s; version %d of %s is needed: "
            "run sgl-ext calibrate again",
            path, found.version, found.subject, VERSION, subject,
        )  # fmt: skip
        return None
    compute, loads = found.compute, found.loads.values()
    latencies = [one.latency for one in loads]
    least = min([compute.overhead, compute.per_pair, found.crossover, *latencies])
    if least < 0 or min([compute.per_token, *(one.per_token for one in loads)]) <= 0:
        logger.warning("%s has costs below zero; run sgl-ext calibrate again", path)
        return None
    return found


def _read(path: Path) -> Profile:
    """Raises OSError if it cannot be read, ValueError if it is no profile."""
    with path.open("rb") as file:
        data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise ValueError(f"it has more than {_LARGEST} bytes")
    try:
        return msgspec.json.decode(data, type=Profile)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def known(directory: Path) -> Iterable[Profile]:
    """All profiles of this version."""
    for path in directory.glob("*.json"):
        try:
            found = _read(path)
        except (OSError, ValueError):
            continue
        if found.version == VERSION:
            yield found


def save(profile: Profile, directory: Path) -> Path:
    """Writes it whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    path = path_of(profile.subject, directory)
    fd, partial = tempfile.mkstemp(dir=directory, prefix=".profile-")
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
    Path(partial).rename(path)
    return path
