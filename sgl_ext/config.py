"""Typed configuration: one section per power, absent means off.

Read once at the edge (``--ext-config``: a YAML or JSON file, or inline JSON), validated whole,
then passed on unchanged.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ByteSize,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from sgl_ext.chunks.methods import link_method
from sgl_ext.config_source import ConfigError, read
from sgl_ext.config_values import (
    Bytes,
    Directories,
    Directory,
    EmulatedDevice,
    Seconds,
    Section,
    Share,
    written_size,
)
from sgl_ext.errors import ExtError

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


class Memory(Section):
    """Where KV lies on the device, and how it is handed out."""

    layout: Literal["auto", "block_major", "layer_major"] = "auto"
    """``block_major``: one slab of blocks that hold all layers; ``layer_major``: SGLang's own;
    ``auto``: the slab wherever it serves."""
    first_group: Annotated[int, Field(ge=1, le=1 << 24, strict=True)] = 1000
    """Tokens that a new request's first block group is made for (FastSwitch §3.1)."""


class HostTier(Section):
    """Host memory below the device pool."""

    capacity: Bytes
    emulate: EmulatedDevice | None = None
    """Of loads from it."""
    link: EmulatedDevice | None = None
    """Between it and the device, both ways."""


KeepAfter = Annotated[int, Field(ge=1, le=1000, strict=True)]
"""A page is given to the tier when it was seen that often."""


class SsdTier(Section):
    """Striped SSDs: one directory per device."""

    directories: Directories
    capacity: Bytes
    """Of each directory, on disk."""
    keep_after: KeepAfter = 2
    fsync: bool = False
    """Whether a page counts as stored only when the device says that it will survive a power
    failure. Without it a page survives the end of this process, and one that a power failure has
    torn is found out and computed again."""
    emulate: EmulatedDevice | None = None
    """Of each directory."""


class RemoteTier(Section):
    """A Mooncake store."""

    master: Annotated[str, Field(pattern=r"^\S+:\d{1,5}$")]
    """``host:port`` of its master."""
    segment: Bytes = ByteSize(1 << 30)
    """Memory of this machine that the store may use, taken as it fills."""
    host: str | None = None
    """Address at which other machines reach this one; without it, the one that leads to the
    master."""
    keep_after: KeepAfter = 1


class Tiers(Section):
    """KV beyond the device (exact)."""

    host: HostTier | None = None
    ssd: SsdTier | None = None
    remote: RemoteTier | None = None
    staging: Bytes = ByteSize(256 << 20)
    """Host memory for pages on their way, where there is no host tier."""
    wait: Seconds = 10.0
    """How long a request is held back, at most, while its pages come from lower tiers; then what
    is missing is computed."""

    @model_validator(mode="after")
    def _not_none(self) -> Self:
        if not (self.host or self.ssd or self.remote):
            raise ValueError("no tier is given; name one of host, ssd, remote")
        return self


class Chunks(Section):
    """Position-independent chunk caching (approximate; EPIC)."""

    method: str = "primed+offline-16"
    """How contexts are linked that do not say it themselves."""
    limit: Annotated[int, Field(ge=16, le=10_000_000, strict=True)] = 100_000
    """Contexts that are kept; the least recently used go first. The server's look at itself takes
    some."""
    largest_divergence: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.5
    """Nats: a server whose chunks are further off, on the probe that it starts with, ends."""
    automatic: bool = False
    """Whether a part of a prompt whose text is a context's is linked without naming it."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        try:
            link_method(self.method)
        except ExtError as error:
            raise ValueError(str(error)) from None
        return self


class Restore(Section):
    """Computes the front of a cached prefix while its back loads (exact; CacheFlow)."""

    policy: Literal["shortest", "longest", "cake"] = "shortest"
    """Who goes first among requests that are restored: the least remaining time, by computing and
    by loading; the largest recomputation, by loading (CacheFlow); the first come (Cake)."""
    chunk: Annotated[int, Field(ge=1, le=1 << 20, strict=True)] = 512
    """Tokens that are computed at a time while others load."""
    ageing: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] = 0.5
    """Seconds of remaining time that a second of waiting is worth, to ``shortest``."""
    host: Literal["auto", "tokens", "layers", "never"] = "auto"
    """What is computed of what host memory has, while the rest of it loads: the first tokens, the
    lower layers, what is faster for its length if anything is, or nothing."""


class SwapBaseline(Section):
    """Parts of swapping as they were before it (vLLM's, FastSwitch §2.2)."""

    recompute: bool = False
    """Nothing is swapped: what gives way is computed again, as SGLang does."""
    by_layer: bool = False
    """Keys and values of each page and layer are copied by themselves."""
    wait: bool = False
    """All wait until what gives way has been copied."""
    copy_again: bool = False
    """All pages of a request are copied when it gives way or ends, whatever was copied before."""


class Swap(Section):
    """Preempted requests are swapped instead of recomputed (exact; FastSwitch)."""

    capacity: Bytes
    """Of the host tier, for requests that are swapped out; of a host tier of that size if none is
    given."""
    policy: Literal[
        "sglang", "fcfs", "static", "round-robin", "token-counter", "random", "markov"
    ] = "sglang"
    """Who gives way: ``sglang``: as its own options say; ``fcfs``: only who came last, and only
    where memory runs out; ``static``: the lower priority; ``round-robin``: who has had its turn;
    ``token-counter``: who belongs to the client (``cache_salt``) that was served most (VTC);
    ``random``, ``markov``: by chance, to measure with."""
    swap_in: Literal["auto", "wait", "overlap"] = "auto"
    """Whether others decode while a request's KV comes: if that costs fewer tokens than waiting for
    it, never, or always."""
    quantum: Annotated[int, Field(ge=1, le=1 << 30, strict=True)] = 50
    """Iterations of a turn (``round-robin``) or until priorities change (``random``, ``markov``);
    tokens, the generated ones counting twice, that clients may differ by (``token-counter``)."""
    ageing: Annotated[int, Field(ge=1, le=1 << 30, strict=True)] = 1000
    """Iterations of waiting that are worth one priority, to ``static``."""
    seed: Annotated[int, Field(strict=True)] = 0
    """Of ``random`` and ``markov``."""
    baseline: SwapBaseline = SwapBaseline()
    """To measure against; slower."""


class Peer(Section):
    """Engines of one host lend each other KV memory (exact; SwiftCache)."""

    role: Literal["master", "worker"]
    """A master borrows, its workers lend; their models may differ."""
    directory: Directory
    """Private to the user; engines that name the same one find each other. It has one master."""
    capacity: Bytes | None = None
    """Most that a master borrows of all, which it must say, or that a worker lends."""
    granularity: Literal["auto", "unit", "block"] = "auto"
    """What a worker lends at a time: whole blocks of both models (the minimum elastic unit), any
    number of its own, or what suits the sizes."""
    keep: Annotated[int, Field(ge=0, le=1 << 40, strict=True)] = 0
    """Tokens that a worker does not lend, whatever it needs."""
    window: Seconds = 60.0
    """What a worker's requests have needed together is not lent for so long."""
    deadline: Seconds = 10.0
    """In which a master leaves what a worker asks back; then other memory takes its place."""
    lease: Seconds = 10.0
    """Who is not heard of for so long is taken for lost."""

    stream: Literal["direct", "layer", "layers"] = "direct"
    """How a master's attention reads workers' memory: where it is, or through buffers for one
    layer, or for two (SwiftCache's layer stream cache)."""
    busy_rate: Bytes | None = None
    """Bytes per second, at most, between buffers and the memory of workers while these have
    requests of their own; as fast as it goes if not given."""
    emulate: EmulatedDevice | None = None
    """Of the way to workers' memory, through buffers."""

    @model_validator(mode="after")
    def _of_the_role(self) -> Self:
        if self.role == "master" and self.capacity is None:
            raise ValueError("a master says how much it borrows at most: give capacity")
        if self.role == "worker" and (self.stream != "direct" or self.emulate or self.busy_rate):
            raise ValueError("stream, busy_rate and emulate are a master's; leave them out")
        if (self.emulate or self.busy_rate) and self.stream == "direct":
            raise ValueError("only what goes through buffers can be slowed down: give stream")
        return self


class Clusters(Section):
    """Decode over contexts on SSDs by co-activation (approximate; Swarm)."""

    directories: Directories
    """One for each device. Contexts are found again under the same ones in the same order."""
    sparsity: Share = 0.1
    """Of a context's blocks, what each query is given, if its request does not say it."""
    largest: Share = 0.25
    """That a request may ask for; every open context has memory for so many blocks."""
    hot: Bytes = ByteSize(64 << 20)
    """Memory of an open context for the blocks that are wanted most often."""
    open: Annotated[int, Field(ge=1, le=10_000, strict=True)] = 4
    """Contexts that are open at once; requests for further ones wait."""
    prefetch: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] = 0.0
    """Of what a query is given, how much is read for the next layer while one computes."""
    deadline: Seconds = 10.0
    """In which a device has to give the blocks of a layer."""
    wait: Seconds = 60.0
    """How long a request waits, at most, until its context is open."""
    emulate: EmulatedDevice | None = None
    """Of each directory."""

    @model_validator(mode="after")
    def _within(self) -> Self:
        if self.sparsity > self.largest:
            raise ValueError("sparsity is larger than largest; raise largest")
        return self


class ExtConfig(Section):
    """The whole configuration; every section is off unless it is present."""

    start_deadline: Seconds = 1800.0
    """How long the launcher waits for SGLang's schedulers to load the model."""

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
        """Without a host tier, ``swap`` brings one of its own size."""
        if not isinstance(values, Mapping):
            return values
        swap, tiers = values.get("swap"), values.get("tiers", {})
        if not (isinstance(swap, Mapping) and isinstance(tiers, Mapping)) or "host" in tiers:
            return values
        try:
            capacity = Swap.model_validate(swap).capacity
        except ValidationError:
            return values  # it is told of swap
        return {**values, "tiers": {**tiers, "host": {"capacity": capacity}}}

    @field_validator(*SECTIONS, mode="before")
    @classmethod
    def _not_empty(cls, section: object) -> object:
        if section is None:  # a key without a value, in YAML: on or off?
            raise ValueError("the section is empty: write {} to switch it on, or remove it")
        return section

    @model_validator(mode="after")
    def _whole_forwards(self) -> Self:
        if self.clusters and (self.chunks or self.restore):
            raise ValueError(
                "chunks and restore go on with other rows in the middle of a forward, which rows "
                "over stored contexts do not: leave out clusters, or the others"
            )
        if self.clusters and self.peer and self.peer.stream != "direct":
            raise ValueError(
                "rows over stored contexts do not read layer buffers: set peer.stream to direct"
            )
        return self

    @model_validator(mode="after")
    def _something_to_restore_from(self) -> Self:
        if self.restore and not self.tiers:
            raise ValueError("restore needs something to restore from: give a tiers section")
        return self

    @model_validator(mode="after")
    def _forwards_of_all_layers(self) -> Self:
        if self.peer and self.peer.stream != "direct" and (self.chunks or self.restore):
            raise ValueError(
                "chunks and restore go on with other rows in the middle of a forward, for which "
                "layer buffers were not filled: set peer.stream to direct"
            )
        return self

    @model_validator(mode="after")
    def _part_of_host_memory(self) -> Self:
        if self.swap is None or self.tiers is None or self.tiers.host is None:
            return self
        if self.swap.capacity > self.tiers.host.capacity:
            raise ValueError(
                f"swap.capacity ({written_size(self.swap.capacity)}) is a part of "
                f"tiers.host.capacity ({written_size(self.tiers.host.capacity)}), and larger"
            )
        return self

    @model_validator(mode="after")
    def _directories_apart(self) -> Self:
        if self.tiers and self.tiers.ssd and self.clusters:
            both = set(self.tiers.ssd.directories) & set(self.clusters.directories)
            if both:
                raise ValueError(
                    f"tiers.ssd and clusters both name {', '.join(map(str, sorted(both)))}; "
                    "give each its own directory"
                )
        return self

    def sections(self) -> dict[str, Section]:
        """The sections that are switched on, by name."""
        present = {name: getattr(self, name) for name in SECTIONS}
        return {name: section for name, section in present.items() if section is not None}

    def resolved(self) -> dict[str, Any]:
        """Every value in force, defaults included, in plain JSON types with units.

        What is off is left out, so that this can be read back.
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
    """What was found, short enough for one line."""
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
        message = f"expected a section such as {EXAMPLES[where]}, or none to leave it off"
    if not where and problem["type"] == "value_error":
        return message
    if not where:
        return f"expected sections ({', '.join(SECTIONS)}), found {_echo(found)}"
    return f"{where!r}: {message}, found {_echo(found)}"


def _fields_at(location: list[str]) -> list[str]:
    """Names of the fields of the section at ``location``."""
    model: type[BaseModel] = ExtConfig
    for name in location:
        annotation = model.model_fields[name].annotation
        options = [annotation, *getattr(annotation, "__args__", ())]
        model = next(o for o in options if isinstance(o, type) and issubclass(o, BaseModel))
    return list(model.model_fields)
