"""Profile of the costs of computing and loading on one machine, kept in the user's cache."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from sgl_ext.config import Tiers
from sgl_ext.planning.compute_cost import ComputeCost, DecodeCost
from sgl_ext.planning.costs import HOST, Costs
from sgl_ext.planning.load_cost import LoadCost

VERSION = 3
"""Version of the file and of the meaning of its figures."""

PROFILES = "profiles"
"""Folder of the profiles in the user's cache."""
_LARGEST = 1 << 20
"""Maximum size of a profile, in bytes."""

logger = logging.getLogger(__name__)


class Subject(msgspec.Struct, frozen=True):
    """Subject of a profile: a model with its dtype and page size, on a device."""

    model: str
    """Fingerprint of the model's weights."""
    dtype: str
    page: int
    device: str


class Profile(msgspec.Struct, frozen=True):
    """Measured costs, in seconds."""

    subject: Subject
    compute: ComputeCost
    loads: dict[str, LoadCost]
    """Cost of a load, by channel: lower tiers and :data:`~sgl_ext.planning.costs.HOST`."""
    devices: dict[str, str]
    """Description of each tier when it was measured; see :func:`devices`."""
    decode: DecodeCost | None = None
    """Cost of a decode step; None if none was measured."""
    version: int = VERSION

    def seed(self, costs: Costs, tiers: Mapping[str, str]) -> None:
        """Makes these costs the first estimates of ``costs``.

        The measured cost of a tier is used only if the tier's description has not changed. Logs a
        warning if a tier is not covered.

        Args:
            tiers: current :func:`devices`.
        """
        loads = {
            name: cost for name, cost in self.loads.items()
            if self.devices.get(name) == tiers.get(name)
        }  # fmt: skip
        if missing := sorted({*tiers} - {*loads, HOST}):
            logger.warning("the cost profile has no costs of %s; run sgl-ext calibrate", missing)
        costs.seed(self.compute, loads, self.decode)


def devices(tiers: Tiers) -> dict[str, str]:
    """Returns the settings that determine the speed of each tier, as text by tier."""
    found = {}
    if tiers.host is not None:
        found[HOST] = tiers.host.model_dump_json(include={"emulate", "link"})
    if tiers.ssd is not None:
        found["ssd"] = tiers.ssd.model_dump_json(include={"directories", "emulate"})
    if tiers.remote is not None:
        found["remote"] = tiers.remote.model_dump_json(include={"master", "host"})
    if tiers.layout != "token_major":  # the layout of profiles that name none
        found = {name: f"{settings} {tiers.layout}" for name, settings in found.items()}
    return found


def path_of(subject: Subject, directory: Path) -> Path:
    """Returns the path of the profile of ``subject``."""
    digest = hashlib.sha256(msgspec.json.encode(subject)).hexdigest()[:16]
    return directory / f"{digest}.json"


def find(subject: Subject, directory: Path) -> Profile | None:
    """Returns the profile of ``subject``; None if there is none or, with a warning, if it is
    unusable."""
    path = path_of(subject, directory)
    try:
        found = _read(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s is not a cost profile (%s); run sgl-ext calibrate again", path, error)
        return None
    if found.version != VERSION or found.subject != subject:
        logger.warning(
            "%s is a cost profile of version %d of %s, expected version %d of %s: run sgl-ext "
            "calibrate again",
            path, found.version, found.subject, VERSION, subject,
        )  # fmt: skip
        return None
    compute, loads = found.compute, found.loads.values()
    decode = found.decode or DecodeCost()
    latencies = [decode.overhead, *(one.latency for one in loads)]
    least = min([compute.overhead, compute.per_pair, *latencies])
    each = [compute.per_token, decode.per_request, *(one.per_token for one in loads)]
    if least < 0 or min(each) <= 0:
        logger.warning("%s has costs that are not positive; run sgl-ext calibrate again", path)
        return None
    return found


def _read(path: Path) -> Profile:
    """Reads a profile.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a profile.
    """
    with path.open("rb") as file:
        data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise ValueError(f"it has more than {_LARGEST} bytes")
    try:
        return msgspec.json.decode(data, type=Profile)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def known(directory: Path) -> Iterable[Profile]:
    """Yields all profiles of this version; skips unreadable ones."""
    try:
        paths = [*directory.glob("*.json")]
    except OSError:  # of a directory that may not be entered
        return
    for path in paths:
        try:
            found = _read(path)
        except (OSError, ValueError):
            continue
        if found.version == VERSION:
            yield found


def save(profile: Profile, directory: Path) -> Path:
    """Writes a profile atomically and returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = path_of(profile.subject, directory)
    fd, partial = tempfile.mkstemp(dir=directory, prefix=".profile-")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
        Path(partial).rename(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    return path
