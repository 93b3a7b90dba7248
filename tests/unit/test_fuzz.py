"""Fuzz tests: mutated inputs raise the documented error, or none.

The inputs are files, messages, parameters and configurations; ``SGLEXT_ROUNDS`` sets the number of
each kind.
"""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgspec
import numpy as np
import pytest
from fastapi import FastAPI
from fuzz_kit import PATIENT, mutate, rounds
from malformed_kit import PATHS, encoded, spoiled
from pydantic import ValidationError
from tier_kit import LAYOUT, directories, folder, get, put

from sgl_ext.chunks.composition import Composition, LinkedChunk, Selection
from sgl_ext.config import load
from sgl_ext.config.source import ConfigError
from sgl_ext.engine.chunks.api import CreateContexts, router
from sgl_ext.engine.chunks.parameters import COMPOSITION, SELECTION, read_parameters
from sgl_ext.engine.clusters.api import StoreContext
from sgl_ext.engine.clusters.api import install as install_clusters
from sgl_ext.engine.clusters.parameters import RECORDED, read_stored
from sgl_ext.engine.front.custom_params import STORED
from sgl_ext.engine.swap.api import install as install_swap
from sgl_ext.memory.lent import Extent
from sgl_ext.memory.mapping import PAGE
from sgl_ext.memory.transfer import TransferEngine
from sgl_ext.peer.messages import Keep, Lend, ProtocolError, Refusal, decode, encode
from sgl_ext.planning.compute_cost import ComputeCost
from sgl_ext.planning.costs import Costs
from sgl_ext.planning.load_cost import LoadCost
from sgl_ext.planning.profile import Profile, Subject, find, known, path_of, save
from sgl_ext.tiers.arena import TRAILER, Arena, seals
from sgl_ext.tiers.folder import Folder
from sgl_ext.tiers.ssd import SsdTier

pytestmark = PATIENT


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Disables warnings, because each invalid input logs one."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def inputs(count: int, *examples: Any, parse: Callable[[bytes], Any]) -> Iterator[bytes]:
    """Yields examples with changed bytes, and examples with replaced or removed values.

    Args:
        parse: returns the plain data of an example.
    """
    rng = random.Random(23)  # noqa: S311
    plain = [parse(example) for example in examples]
    for number in range(rounds(count)):
        which = number % len(examples)
        data = examples[which]
        if number // len(examples) % 2:
            data = encoded(spoiled(plain[which], rng))
        for _ in range(rng.choice((0, 1, 1, 3)) if number // len(examples) % 2 else 1):
            data = mutate(data, rng)
        yield data


def packed(value: Any) -> Any:
    return msgspec.to_builtins(value, builtin_types=(bytes,))


def test_mutated_peer_messages_raise_protocol_error_or_round_trip() -> None:
    memory = (Extent("slab-1", 5, 0, 4 * PAGE), Extent("slab-2", 6, PAGE, PAGE))
    messages = (
        Lend(b"worker", 1, b"master", 3, 2 * PAGE, 77, memory, True),
        Keep(b"worker", 1, b"master", 3, 77, 3072, 4 * PAGE, PAGE, "full"),
        Refusal("it is too old"),
    )
    rng = random.Random(11)  # noqa: S311
    for number in range(rounds(9000)):
        message = messages[number % 3]
        data = mutate(encode(message), rng)
        if number % 2:
            with suppress(TypeError, OverflowError, ValueError, RecursionError):
                data = msgspec.msgpack.encode(spoiled(packed(message), rng))
        if number % 50 == 0:
            data = data[: rng.randrange(len(data) + 1)] + rng.choice((b"\x91", b"\x81\xa1a")) * 3000
        with suppress(ProtocolError):
            decoded = decode(data)
            assert decode(encode(decoded)) == decoded


PROFILE = Profile(
    Subject("fingerprint", "bfloat16", 16, "a machine"), ComputeCost(1e-3, 2e-4, 3e-9),
    {"ssd": LoadCost(0.0, 1e-4)}, {"ssd": "a disk"}, 300, {"tokens": {128: 0.5}},
)  # fmt: skip


def test_mutated_cost_profiles_raise_no_error(tmp_path: Path) -> None:
    path = save(PROFILE, tmp_path)
    assert path == path_of(PROFILE.subject, tmp_path)
    for data in inputs(3000, path.read_bytes(), parse=json.loads):
        path.write_bytes(data)
        found = find(PROFILE.subject, tmp_path)
        for profile in (found, *known(tmp_path)):
            if profile is not None:
                profile.seed(Costs(), {"ssd": "a disk"})


CONFIGURATION = """\
{"memory": {"layout": "block_major"}, "start_deadline": "10 min",
 "tiers": {"host": {"capacity": "4GiB"}, "staging": "64MiB", "wait": "250ms",
           "ssd": {"directories": ["/a"], "capacity": "1GiB", "keep_after": 2}},
 "swap": {"capacity": "1GiB", "policy": "static"}, "chunks": {"method": "lego-16", "limit": 9}}
"""


@pytest.mark.parametrize("written", ["yaml", "json"])
def test_mutated_configurations_raise_only_config_error(tmp_path: Path, written: str) -> None:
    path = tmp_path / "config.yaml"
    for data in inputs(750, CONFIGURATION.encode(), parse=json.loads):
        source: Any = data.decode("latin-1").replace("\0", " ")
        if written == "yaml":
            path.write_bytes(data)
            source = path
        with suppress(ConfigError):
            load(source)


def asked(data: bytes) -> Any:
    """Returns a request as schedulers see it, with ``data`` as its ``custom_params``.

    Returns None if ``data`` is not JSON.
    """
    try:
        params = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params=params), origin_input_ids=[5] * 100,
        extra_key=COMPOSED.extra_key, return_logprob=True, logprob_start_len=3,
    )  # fmt: skip


COMPOSED = Composition(
    "lego-2", "ext:chunk", ((1, 2),), (LinkedChunk(4, 20, 0, (0, 1)), LinkedChunk(30, 8, 0, (), 5))
)


def test_mutated_request_parameters_raise_only_value_error() -> None:
    params = {
        COMPOSITION: msgspec.to_builtins(COMPOSED),
        SELECTION: msgspec.to_builtins(Selection("ext:chunk", 100, (1,), (2,), 16)),
        STORED: {"id": "stx-one", "sparsity": 0.5},
        RECORDED: {"id": "stx-one", "tokens": 5, "queries": 1, "last": True},
    }
    each = [json.dumps({name: value}).encode() for name, value in params.items()]
    for data in inputs(4000, *each, parse=json.loads):
        if (request := asked(data)) is None:
            continue
        for read in (read_stored, lambda request: read_parameters(request, "not here")):
            with suppress(ValueError):
                read(request)


def test_mutated_request_bodies_raise_only_validation_error() -> None:
    bodies = (
        b'{"chunks": ["a", [5, 6]], "method": "lego-2", "split": {"by": "tokens", "tokens": 4},'
        b' "prefix": "p", "ttl": 5.0, "cache_salt": "s"}',
        b'{"text": "a", "record_only": true}',
        b'{"input_ids": [5, 6, 7]}',
    )
    for data in inputs(3000, *bodies, parse=json.loads):
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            continue
        for model in (CreateContexts, StoreContext):
            with suppress(ValidationError):
                model.model_validate(body)


def test_malformed_requests_are_sent_to_every_route_of_the_extension() -> None:
    app = FastAPI()
    install_swap(app, MagicMock(), None)
    install_clusters(app, MagicMock())
    paths = {str(route.path) for route in (*app.routes, *router(MagicMock()).routes)}  # type: ignore[attr-defined]
    ours = {
        re.sub(r"{\w+(:path)?}", "{}", path).rstrip("/")
        for path in paths
        if path.startswith("/ext/")
    }
    assert len(ours) == 10
    assert ours <= PATHS


def test_mutated_layout_files_of_ssd_tiers_are_rewritten(tmp_path: Path) -> None:
    Folder(tmp_path, LAYOUT).close()
    (layout,) = tmp_path.glob("*/layout.json")
    whole = layout.read_bytes()
    for data in inputs(750, whole, parse=json.loads):
        layout.write_bytes(data)
        Folder(tmp_path, LAYOUT).close()
        assert layout.read_bytes() == whole or json.loads(data) == json.loads(whole)


def test_mutated_page_files_of_ssd_tiers_never_yield_wrong_pages(
    tmp_path: Path,
) -> None:
    """The seal of a slot may be valid although its trailer describes no page."""
    host, (disk,) = Arena(LAYOUT, 8), directories(tmp_path, 1)
    rng = random.Random(7)  # noqa: S311

    @contextmanager
    def opened() -> Iterator[SsdTier]:
        with TransferEngine() as engine:  # the threads of a tier's lane end with the engine
            engine.register(host.address, host.size, owner=host)
            tier = SsdTier(host, engine, [disk], 8 * host.stride, backend="threads")
            yield tier
            tier.close()

    with opened() as tier:
        assert all(put(tier, host, *range(6)))
    pages = folder(disk) / "pages"
    whole = pages.read_bytes()
    for number in range(rounds(250)):
        data = bytearray(mutate(whole, rng))
        if number % 2:
            at = rng.randrange(6) * host.stride + host.stride - TRAILER.itemsize
            data = bytearray(whole)
            spoilt = mutate(whole[at : at + TRAILER.itemsize], rng)
            data[at : at + TRAILER.itemsize] = spoilt[: TRAILER.itemsize].ljust(
                TRAILER.itemsize, b"\xff"
            )
            trailer = np.frombuffer(data, TRAILER, 1, at)
            trailer["seal"] = seals(trailer)
        pages.write_bytes(data)
        with opened() as tier:
            get(tier, host, *range(6))  # checks that loaded pages are right
            assert all(put(tier, host, 100 + number % 7))
