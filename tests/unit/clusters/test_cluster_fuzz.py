"""Fuzz tests of damaged and planted files of stored contexts.

A damaged file raises the documented error, or is read as it was written.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fuzz_kit import PATIENT, mutate, rounds
from planted_kit import content_of, planted
from test_stored import devices_of, saved

from sgl_ext.clusters import arrays
from sgl_ext.clusters.build import build
from sgl_ext.clusters.geometry import Geometry
from sgl_ext.clusters.paths import index_file
from sgl_ext.clusters.profile import Options
from sgl_ext.clusters.reader import DeviceError
from sgl_ext.clusters.recorded import Recorded
from sgl_ext.clusters.stored import Stored, about
from sgl_ext.engine.clusters.attention import StoredAttention
from sgl_ext.engine.clusters.memory import StoredMemory
from sgl_ext.engine.clusters.own import Own
from sgl_ext.engine.cpu.native_attention import NativeAttention
from sgl_ext.errors import ExtError
from sgl_ext.memory.transfer import TransferEngine

pytestmark = PATIENT


GEOMETRY = Geometry(
    layers=2, heads=2, kv_heads=1, head_dim=16, dtype="float32", scale=0.2, fingerprint="a model"
)
TOKENS, OPTIONS = 300, Options(sinks=2, window=8, subspaces=2)
LONGEST = 1 << 12
NUMBERS = (
    0,
    -1,
    1,
    2,
    3,
    255,
    1 << 20,
    (1 << 31) - 1,
    1 << 31,
    1 << 63,
    1 << 200,
    0.5,
    -0.0,
    1e308,
)
VALUES = (*NUMBERS, None, True, "", "float64", "bfloat16", [], {}, [[[]]], "\0", "\U0001f600")


def recorded_context() -> Recorded:
    chance = np.random.default_rng(1)
    values = chance.normal(size=(GEOMETRY.layers, TOKENS, GEOMETRY.entry_bytes // 4))
    return Recorded(
        GEOMETRY,
        chance.integers(0, 1000, TOKENS).astype(np.int32),
        values.astype("<f4").view(np.uint8),
        chance.normal(size=(GEOMETRY.layers, 20, GEOMETRY.heads, 16)).astype(np.float32),
        np.arange(TOKENS - 20, TOKENS),
        "a tenant",
    )


class Kept:
    """Stored context, and the contents of its files as they were written."""

    def __init__(self, directory: Path) -> None:
        self.folders = [directory / f"device{at}" for at in range(2)]
        for each in self.folders:
            each.mkdir()
        self.record = saved(recorded_context(), directory / "record")
        build(recorded_context(), "a", self.folders, OPTIONS)
        self.index = index_file(self.folders[0], "a")
        self.stored = Stored.open("a", self.folders, GEOMETRY, LONGEST)
        files = (self.index, self.record, *self.stored.files)
        self.contents = {file: file.read_bytes() for file in files}
        for file in files:  # so that opening a file does not write its mode
            file.chmod(0o600)

    def opened(self) -> Stored | None:
        """Returns the context; None if it is refused."""
        try:
            return Stored.open("a", self.folders, GEOMETRY, LONGEST)
        except ExtError as error:
            assert str(self.record.parent) not in str(error)  # clients receive the message
            return None

    def restore(self) -> None:
        for file, contents in self.contents.items():
            file.write_bytes(contents)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    return Kept(tmp_path_factory.mktemp("contexts"))


@pytest.fixture
def kept(whole: Kept) -> Iterator[Kept]:
    yield whole
    whole.restore()


def same(one: Stored, other: Stored) -> bool:
    left, right = (
        [each.tokens, *(array for layer in each.layers for array in arrays_of(layer))]
        for each in (one, other)
    )
    return one.about == other.about and all(map(np.array_equal, left, right))


def arrays_of(layer: Any) -> list[np.ndarray]:
    return [*vars(layer.codes).values(), layer.order, layer.often, layer.sums, layer.resident]


def test_an_index_with_a_flipped_bit_in_its_header_is_refused(kept: Kept) -> None:
    """Flips bits of the header, which is all that is read of a context to list it."""
    contents = kept.contents[kept.index]
    header = 8 + int.from_bytes(contents[:8], "little")
    bits = range(8 * header)
    chance = random.Random(0)  # noqa: S311
    for bit in chance.sample(bits, min(rounds(3000), len(bits))):
        flipped = bytearray(contents)
        flipped[bit // 8] ^= 1 << bit % 8
        kept.index.write_bytes(flipped)
        for found, expected in ((listed(kept), kept.stored.about), (kept.opened(), kept.stored)):
            if isinstance(found, Stored):
                assert same(found, kept.stored)
            else:
                assert found in (None, expected)


def listed(kept: Kept) -> object:
    try:
        return about("a", kept.folders)
    except ExtError:
        return None


def test_a_damaged_index_is_refused(kept: Kept) -> None:
    chance, contents = random.Random(1), kept.contents[kept.index]  # noqa: S311
    for _ in range(rounds(1500)):
        kept.index.write_bytes(mutate(contents, chance))
        assert listed(kept) in (None, kept.stored.about)
        found = kept.opened()
        assert found is None or same(found, kept.stored)


def test_a_damaged_record_is_refused(kept: Kept) -> None:
    chance, contents = random.Random(2), kept.contents[kept.record]  # noqa: S311
    expected = Recorded.load(kept.record.parent)
    expected_kv = expected.kv[:]
    for _ in range(rounds(1000)):
        kept.record.write_bytes(mutate(contents, chance))
        try:
            found = Recorded.load(kept.record.parent)
            kv = found.kv[:]
        except ExtError:
            continue
        assert (found.geometry, found.salt) == (expected.geometry, expected.salt)
        assert np.array_equal(kv, expected_kv)
        for name in ("tokens", "queries", "seen"):
            assert np.array_equal(getattr(found, name), getattr(expected, name))


def other_about(found: dict[str, Any], chance: random.Random) -> bytes:
    """Returns a description in which one field, or the JSON text itself, is changed."""
    if chance.random() < 0.3:
        return mutate(json.dumps(found).encode(), chance)
    found = json.loads(json.dumps(found))
    inside = chance.choice([found, found["geometry"]])
    name = chance.choice([*inside])
    if chance.random() < 0.1:
        del inside[name]
    elif isinstance(inside[name], int) and chance.random() < 0.5:
        inside[name] += chance.choice((-1, 1, 16, -16))
    else:
        inside[name] = chance.choice(VALUES)
    return json.dumps(found).encode()


def other_array(content: arrays.Arrays, chance: random.Random) -> arrays.Arrays:
    """Returns arrays of which one has another dtype, shape, name or other values."""
    found = {name: array.copy() for name, array in content.items()}
    name = chance.choice([*found])
    array = found[name]
    kind = chance.randrange(6)
    if kind == 0:
        found[name] = array.astype(chance.choice(["u1", "i2", "i4", "i8", "u8", "f4", "f8", "?"]))
    elif kind == 1:
        found[name] = np.delete(array, 0, axis=chance.randrange(array.ndim))
    elif kind == 2:
        found[name] = array.reshape(chance.choice([(1, *array.shape), (-1,), (*array.shape, 1)]))
    elif kind == 3:
        found[chance.choice([*found, "more"])] = found.pop(name)
    else:
        raw = array.reshape(-1).view(np.uint8)
        for _ in range(chance.randint(1, 8)):
            raw[chance.randrange(len(raw))] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
    return found


def plant_other(
    path: Path, found: dict[str, Any], content: arrays.Arrays, chance: random.Random
) -> None:
    """Writes a file in which the description or an array is changed and the digests are right."""
    if chance.random() < 0.5:
        planted(path, other_about(found, chance), content)
    else:
        planted(path, json.dumps(found).encode(), other_array(content, chance))


Attend = Callable[[Stored], None]


@pytest.fixture
def attend() -> Iterator[Attend]:
    """Yields a function that attends to a context as a forward does.

    The function raises DeviceError if a block is not what was written.
    """
    native = NativeAttention()
    shape = (GEOMETRY.layers, 8, 2, GEOMETRY.kv_heads, GEOMETRY.head_dim)
    pool, query = torch.ones(shape), torch.ones(2, GEOMETRY.heads, GEOMETRY.head_dim)
    own = Own.of([np.arange(3)], [2])
    with TransferEngine() as engine:
        # As in a server, each device is opened once: its lane owns threads and descriptors.
        devices = cache(lambda folders: devices_of(engine, folders))

        def once(stored: Stored) -> None:
            memory = StoredMemory(
                engine, devices(tuple(file.parent for file in stored.files)), stored,
                hot=9000, most=1000, deadline=20,
            )  # fmt: skip
            try:
                served = StoredAttention(stored, memory)
                for layer, share in itertools.product(range(GEOMETRY.layers), (0.2, 1.0)):
                    keys, values = pool[layer].unbind(1)
                    served.attend(native, layer, query, keys, values, own, share)
            finally:
                memory.close()

        yield once


def test_a_planted_index_is_refused_or_harmless(kept: Kept, attend: Attend) -> None:
    chance = random.Random(3)  # noqa: S311
    said, content = content_of(kept.index)
    served = 0
    for _ in range(rounds(1500)):
        plant_other(kept.index, said, content, chance)
        listed(kept)
        if (found := kept.opened()) is not None and served < 100:
            served += 1
            try:
                attend(found)
            except DeviceError:  # the blocks do not have these checksums
                continue
    assert served


def test_a_planted_record_is_refused_or_stored(kept: Kept, tmp_path: Path) -> None:
    chance = random.Random(4)  # noqa: S311
    said, content = content_of(kept.record)
    tried = 0
    for _ in range(rounds(500)):
        plant_other(kept.record, said, content, chance)
        try:
            found = Recorded.load(kept.record.parent)
            if (tried := tried + 1) <= 8:
                build(found, f"b{tried}", [tmp_path], OPTIONS)
        except ExtError:
            continue
    assert tried


def test_damaged_blocks_are_refused(kept: Kept, attend: Attend) -> None:
    chance = random.Random(5)  # noqa: S311
    for _ in range(rounds(200)):
        file = chance.choice(kept.stored.files)
        file.write_bytes(mutate(kept.contents[file], chance))
        if (found := kept.opened()) is not None:
            if file.read_bytes() == kept.contents[file]:
                attend(found)
            else:
                with pytest.raises(DeviceError, match="blocks are damaged"):
                    attend(found)
        file.write_bytes(kept.contents[file])


def test_links_and_folders_in_place_of_files_are_refused(kept: Kept, tmp_path: Path) -> None:
    for file in (kept.index, kept.stored.files[1]):
        elsewhere = tmp_path / file.name
        shutil.move(file, elsewhere)
        file.symlink_to(elsewhere)
        with pytest.raises(ExtError, match=r"Too many levels of symbolic links"):
            Stored.open("a", kept.folders, GEOMETRY)
        file.unlink()
        file.mkdir()
        assert kept.opened() is None
        file.rmdir()
        shutil.move(elsewhere, file)
    assert kept.opened() is not None
