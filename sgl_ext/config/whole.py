"""The whole configuration: all sections, and the constraints between them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ValidationError, ValidationInfo, field_validator, model_validator

from sgl_ext.config.chunks import Chunks
from sgl_ext.config.clusters import Clusters
from sgl_ext.config.memory import Memory
from sgl_ext.config.peer import Peer
from sgl_ext.config.restore import Restore
from sgl_ext.config.source import ConfigError, read
from sgl_ext.config.swap import Swap
from sgl_ext.config.tiers import Tiers
from sgl_ext.config.values import Seconds, Section, written_size

_LONGEST_ECHO = 80
EXAMPLES = {
    "tiers": '{"host": {"capacity": "4GiB"}}',
    "tiers.host": '{"capacity": "4GiB"}',
    "tiers.ssd": '{"directories": ["/ssd"], "capacity": "100GiB"}',
    "tiers.remote": '{"master": "localhost:50051"}',
    "chunks": "{}",
    "restore": "{}",
    "swap": '{"capacity": "1GiB"}',
    "peer": '{"role": "worker", "directory": "/run/peers"}',
    "clusters": '{"directories": ["/ssd"]}',
}
"""Example values that enable each section, for error messages."""
SECTIONS = ("tiers", "chunks", "restore", "swap", "peer", "clusters")


class ExtConfig(Section):
    """Whole configuration; a section of :data:`SECTIONS` is off unless it is present."""

    start_deadline: Seconds = 1800.0
    """Longest time that the launcher waits for SGLang's schedulers to load the model, in
    seconds."""

    memory: Memory = Memory()

    tiers: Tiers | None = None
    chunks: Chunks | None = None
    restore: Restore | None = None
    swap: Swap | None = None
    peer: Peer | None = None
    clusters: Clusters | None = None

    @model_validator(mode="before")
    @classmethod
    def _swap_to_host_memory(cls, values: object) -> object:
        """Adds a host tier of ``swap.capacity`` if there is a swap section and no host tier."""
        if not isinstance(values, Mapping):
            return values
        swap, tiers = values.get("swap"), values.get("tiers", {})
        if not (isinstance(swap, Mapping) and isinstance(tiers, Mapping)) or "host" in tiers:
            return values
        try:
            capacity = Swap.model_validate(swap).capacity
        except ValidationError:
            return values  # the error is reported for swap
        return {**values, "tiers": {**tiers, "host": {"capacity": capacity}}}

    @field_validator(*SECTIONS, mode="before")
    @classmethod
    def _not_empty(cls, section: object, info: ValidationInfo) -> object:
        if section is None:  # a key without a value in YAML, which may mean on or off
            name = str(info.field_name)
            raise ValueError(
                f"the section is empty; write, for example, {name}: {EXAMPLES[name]}, or remove it"
            )
        return section

    @model_validator(mode="after")
    def _something_to_restore_from(self) -> Self:
        if self.restore and not self.tiers:
            raise ValueError("restore requires a tiers section to restore from; add one")
        return self

    @model_validator(mode="after")
    def _part_of_host_memory(self) -> Self:
        if self.swap is None or self.tiers is None or self.tiers.host is None:
            return self
        if self.swap.capacity > self.tiers.host.capacity:
            raise ValueError(
                f"swap.capacity ({written_size(self.swap.capacity)}) exceeds tiers.host.capacity "
                f"({written_size(self.tiers.host.capacity)}), of which it is a part; lower "
                "swap.capacity, or raise tiers.host.capacity"
            )
        return self

    @model_validator(mode="after")
    def _tokens_of_pages(self) -> Self:
        if self.chunks and self.tiers and self.tiers.layout == "layer_major":
            raise ValueError(
                "chunks copies single tokens out of host-memory pages and does not support "
                "tiers.layout layer_major; remove tiers.layout, or the chunks section"
            )
        return self

    @model_validator(mode="after")
    def _directories_apart(self) -> Self:
        if self.tiers and self.tiers.ssd and self.clusters:
            both = set(self.tiers.ssd.directories) & set(self.clusters.directories)
            if both:
                raise ValueError(
                    f"tiers.ssd and clusters both use {', '.join(map(str, sorted(both)))}; give "
                    "each its own directory"
                )
        return self

    def sections(self) -> dict[str, Section]:
        """Returns the sections that are on, by name."""
        present = {name: getattr(self, name) for name in SECTIONS}
        return {name: section for name, section in present.items() if section is not None}

    def resolved(self) -> dict[str, Any]:
        """Returns every value in force, defaults included, in plain JSON types with units.

        Sections and options that are off are left out, so that the result can be read back.
        """
        return self.model_dump(mode="json", exclude_none=True)


def load(source: str | Path | Mapping[str, object] | None) -> ExtConfig:
    """Reads and validates a configuration.

    Args:
        source: a path, inline JSON (starts with a brace), a mapping, or None for defaults.

    Raises:
        ConfigError: all problems in one message.
    """
    origin, data = read(source)
    try:
        return ExtConfig.model_validate(data)
    except ValidationError as error:
        problems = "; ".join(_describe(problem) for problem in error.errors())
        raise ConfigError(f"{origin}: {problems}") from None


def _echo(value: object) -> str:
    """Returns the representation of a value, cut to fit on one line."""
    written = repr(value)
    return written if len(written) <= _LONGEST_ECHO else f"{written[:_LONGEST_ECHO]}…"


def _describe(problem: Any) -> str:
    location = [str(part) for part in problem["loc"]]
    where = ".".join(location)
    if problem["type"] == "extra_forbidden":
        known = _fields_at(location[:-1])
        close = difflib.get_close_matches(location[-1], known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
        return f"unknown key {where!r} ({hint})"
    found = problem["input"]
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "byte_size_unit" or problem["type"] == "byte_size":
        message = "expected a size with a unit such as '4GiB', or bytes as a whole number"
    if problem["type"] == "missing":
        above = ".".join(location[:-1])
        example = f"; write, for example, {above}: {EXAMPLES[above]}" if above in EXAMPLES else ""
        return f"{where!r} is required{example}"
    if problem["type"] in ("model_type", "dict_type") and where in EXAMPLES:
        message = f"expected a section such as {EXAMPLES[where]}, or no section to disable it"
    if not where and problem["type"] == "value_error":
        return message
    if not where:
        return f"expected sections ({', '.join(SECTIONS)}), found {_echo(found)}"
    what, remedy = message, ""
    if problem["type"] == "value_error":
        what, _, remedy = message.partition("; ")
    return f"{where!r}: {what}, found {_echo(found)}" + (f"; {remedy}" if remedy else "")


def _fields_at(location: list[str]) -> list[str]:
    """Returns the names of the fields of the section at ``location``."""
    model: type[BaseModel] = ExtConfig
    for name in location:
        annotation = model.model_fields[name].annotation
        options = [annotation, *getattr(annotation, "__args__", ())]
        model = next(o for o in options if isinstance(o, type) and issubclass(o, BaseModel))
    return list(model.model_fields)
