"""The KV pool as one block-major slab that another process can map (SwiftCache §3.4).

``[blocks, page, layers, 2, kv_heads, head_dim]``: a block holds every layer of its tokens, so a run
of blocks is one 1-D copy, one layer of it one 2-D copy, and the tail can be given away without
moving anything.

The memory behind it is a memfd: a header, then the blocks from the first huge page on. The
header says what lies there, so that nobody reads bytes of another model, and counts epochs: the
owner begins a new one when blocks that it has told others of change their meaning.
"""

from __future__ import annotations

import os
import secrets
import stat
import struct
import warnings
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from sgl_ext.errors import ExtError
from sgl_ext.memory.mapping import HUGE_PAGE, Mapping, create

if TYPE_CHECKING:
    import torch

_MAGIC = b"sglxslab"
_VERSION = 1
_DATA = HUGE_PAGE
"""Offset of block 0."""
_PREFIX = struct.Struct("<8sIIQ16s")
"""Magic, version, length of the layout, epoch, nonce of this slab."""
_EPOCH = slice(16, 24)

_LONGEST_FINGERPRINT = 1024

DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Element types a slab can hold, by torch's name, with their bytes."""


class SlabError(ExtError):
    """A slab cannot be made or attached: what was asked, what was found, what to do."""


class Layout(msgspec.Struct, frozen=True):
    """Shape and meaning of a slab's bytes; two equal layouts can exchange blocks."""

    page: int
    """Tokens of a block."""
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    """Name of the torch dtype, one of :data:`DTYPES`."""
    fingerprint: str
    """Identifies model, weights and tensor-parallel rank: whose KV this is."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V in all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * DTYPES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.page * self.token_bytes

    def difference(self, other: Layout) -> str:
        """The fields in which ``other`` differs, as ``field expected/found``; empty if equal."""
        return ", ".join(
            f"{field}: expected {ours}, found {theirs}"
            for field in self.__struct_fields__
            if (ours := getattr(self, field)) != (theirs := getattr(other, field))
        )


class SlabHandle(msgspec.Struct, frozen=True):
    """What another process of the same user needs to attach; plain data, to be sent anywhere."""

    pid: int
    fd: int
    blocks: int
    epoch: int
    nonce: bytes


@dataclass(frozen=True)
class Slab:
    """A mapped slab: this process's own (:meth:`create`) or another's (:meth:`attach`)."""

    layout: Layout
    blocks: int
    mapping: Mapping
    nonce: bytes
    writable: bool
    fd: int | None
    """The memfd of an own slab, by which others attach; closed with this object."""

    @classmethod
    def create(cls, layout: Layout, blocks: int) -> Slab:
        """Allocates a zeroed slab.

        Raises:
            SlabError: the geometry is none, the dtype is unknown or the machine is too small.
        """
        encoded = _encoded(layout, blocks)
        size = _DATA + blocks * layout.block_bytes
        with ExitStack() as undo:
            try:
                fd = create("sgl_ext-kv", size)
                undo.callback(os.close, fd)
                mapping = Mapping(fd, size, writable=True)
            except (OSError, ExtError) as error:
                raise SlabError(
                    f"cannot allocate a slab of {blocks} blocks of {layout.block_bytes:,} B: "
                    f"{error}"
                ) from None
            undo.pop_all()
        nonce = secrets.token_bytes(16)
        header = _PREFIX.pack(_MAGIC, _VERSION, len(encoded), 0, nonce) + encoded
        np.asarray(mapping)[: len(header)] = np.frombuffer(header, np.uint8)
        slab = cls(layout, blocks, mapping, nonce, writable=True, fd=fd)
        weakref.finalize(slab, os.close, fd).atexit = False
        return slab

    @classmethod
    def attach(cls, handle: SlabHandle, expected: Layout, *, writable: bool = False) -> Slab:
        """Maps the slab of another process of this user.

        The mapping stays valid when the owner ends. Writing to the tensor of an attachment that
        is not ``writable`` ends this process with a segmentation fault.

        Raises:
            SlabError: the owner has ended, the slab is not the one the handle was made for, holds
                other KV than ``expected``, or its epoch has passed. Nothing is mapped then.
        """
        try:
            return cls._attach(handle, expected, writable)
        except OSError as error:
            raise SlabError(
                f"cannot attach the slab of process {handle.pid} ({error.strerror}); "
                "if that process has ended, ask its successor for a handle"
            ) from None

    @classmethod
    def _attach(cls, handle: SlabHandle, expected: Layout, writable: bool) -> Slab:
        # The number may be another process's by now, and its file anything: a pipe must not block.
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", flags)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise _no_slab(handle)
            found, nonce = _read_header(fd, handle)
            if nonce != handle.nonce:
                raise SlabError(
                    f"process {handle.pid} is not the one the handle was made for; "
                    "ask its owner for a new handle"
                )
            if difference := expected.difference(found):
                raise SlabError(f"the slab of process {handle.pid} does not fit: {difference}")
            size, needed = os.fstat(fd).st_size, _DATA + handle.blocks * found.block_bytes
            if size != needed:
                raise SlabError(
                    f"the slab of process {handle.pid} has {size:,} B, {handle.blocks} blocks of "
                    f"{found.block_bytes:,} B need {needed:,} B"
                )
            mapping = Mapping(fd, size, writable=writable)
        finally:
            os.close(fd)
        slab = cls(found, handle.blocks, mapping, nonce, writable=writable, fd=None)
        # Read through the mapping: an epoch that began while this attached is seen too.
        if (epoch := slab.epoch) != handle.epoch:
            raise SlabError(
                f"the slab of process {handle.pid} is in epoch {epoch}, the handle is of "
                f"epoch {handle.epoch}; ask for a new handle"
            )
        return slab

    @property
    def handle(self) -> SlabHandle:
        """Lets another process attach, as long as the present epoch lasts.

        Raises:
            SlabError: this is an attachment, not the owner's slab.
        """
        if self.fd is None:
            raise SlabError("only the owner of a slab can hand it out; ask it for a handle")
        return SlabHandle(os.getpid(), self.fd, self.blocks, self.epoch, self.nonce)

    @property
    def epoch(self) -> int:
        """The epoch that the owner is in now; an attachment sees it change."""
        return int(np.asarray(self.mapping)[_EPOCH].view(np.uint64)[0])

    def begin_epoch(self) -> int:
        """Makes every handle given out so far stale; for the owner.

        Raises:
            SlabError: this is an attachment.
        """
        if self.fd is None:
            raise SlabError("only the owner of a slab can begin an epoch")
        word = np.asarray(self.mapping)[_EPOCH].view(np.uint64)
        word += np.uint64(1)  # an aligned word: attachments read the old value or the new one
        return int(word[0])

    @property
    def address(self) -> int:
        """Address of block 0 in this process, a multiple of the huge page size."""
        return self.mapping.address + _DATA

    @property
    def size(self) -> int:
        """Bytes of all blocks."""
        return self.blocks * self.layout.block_bytes

    def tensor(self) -> torch.Tensor:
        """``[blocks, page, layers, 2, kv_heads, head_dim]`` over the slab's memory, no copy."""
        import torch

        layout = self.layout
        with warnings.catch_warnings():
            # torch has no read-only tensors and warns of the memory of a read-only attachment.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            flat = torch.from_numpy(np.asarray(self.mapping)[_DATA:])
        return flat.view(getattr(torch, layout.dtype)).view(
            self.blocks, layout.page, layout.layers, 2, layout.kv_heads, layout.head_dim
        )

    def back_with_huge_pages(self, start: int, end: int) -> int:
        """Gives blocks ``[start, end)`` physical memory in huge pages, if the kernel does.

        Returns:
            0, or an errno, as :meth:`Mapping.collapse`.
        """
        if not 0 <= start <= end <= self.blocks:
            raise SlabError(f"blocks {start} to {end} of {self.blocks} cannot be backed")
        # Whole huge pages only, and a page that two calls share belongs to the first.
        first, last = (
            -(-(_DATA + block * self.layout.block_bytes) // HUGE_PAGE) * HUGE_PAGE
            for block in (start, end)
        )
        last = min(last, self.mapping.size // HUGE_PAGE * HUGE_PAGE)
        return self.mapping.collapse(first, last) if first < last else 0


def _encoded(layout: Layout, blocks: int) -> bytes:
    """The layout as it stands in the header, once it is one."""
    if layout.dtype not in DTYPES:
        raise SlabError(f"a slab holds {', '.join(DTYPES)}, not {layout.dtype}")
    counts = {"blocks": blocks} | {
        name: getattr(layout, name) for name in ("page", "layers", "kv_heads", "head_dim")
    }
    good = {name: type(count) is int and count >= 1 for name, count in counts.items()}
    if wrong := [f"{name} {counts[name]}" for name in counts if not good[name]]:
        raise SlabError(f"a slab needs at least one of each dimension, found {', '.join(wrong)}")
    if not layout.fingerprint.isascii() or len(layout.fingerprint) > _LONGEST_FINGERPRINT:
        raise SlabError(
            f"a fingerprint is ASCII of at most {_LONGEST_FINGERPRINT} characters, found "
            f"{layout.fingerprint[:20]!r}"
        )
    return msgspec.json.encode(layout)


def _read_header(fd: int, handle: SlabHandle) -> tuple[Layout, bytes]:
    prefix = os.pread(fd, _PREFIX.size, 0)
    if len(prefix) == _PREFIX.size:
        magic, version, length, _epoch, nonce = _PREFIX.unpack(prefix)
        if magic == _MAGIC and version == _VERSION and length < _DATA - _PREFIX.size:
            try:
                layout = msgspec.json.decode(os.pread(fd, length, _PREFIX.size), type=Layout)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                pass
            else:
                return layout, nonce
        if magic == _MAGIC and version != _VERSION:
            raise SlabError(
                f"the slab of process {handle.pid} has version {version}, this is version "
                f"{_VERSION}; run the same sgl_ext on both sides"
            )
    raise _no_slab(handle)


def _no_slab(handle: SlabHandle) -> SlabError:
    return SlabError(
        f"file {handle.fd} of process {handle.pid} is no slab; ask its owner for a new handle"
    )
