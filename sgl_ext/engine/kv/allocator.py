"""SGLang's KV allocator interface over :class:`~sgl_ext.memory.block_groups.BlockGroups`.

SGLang asks for slots without naming the requests. The batch that is being prepared names them, so
:mod:`~sgl_ext.engine.kv.install` passes them to the allocator (:meth:`BlockGroupAllocator.serving`)
before SGLang asks. Other calls (external tiers, speculative drafts) get slots that belong to no
group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator

from sgl_ext.engine.kv.indices import Slots, on_host, upload
from sgl_ext.engine.kv.known import FreedSlots, KnownSlots
from sgl_ext.memory.block_groups import BlockGroups, Run
from sgl_ext.memory.in_flight import BlocksInFlight
from sgl_ext.memory.runs import runs_of
from sgl_ext.memory.streams import Streams
from sgl_ext.memory.tickets import COPY_DEADLINE_S

Owners = Callable[[], tuple[Sequence[int], Sequence[int]]]
"""Function that returns the batch's rows in the request pool, and the tokens of each row."""
_Result = TypeVar("_Result")


class BlockGroupAllocator(BaseTokenToKVPoolAllocator):
    """Allocator of slots ``[page, size + page)`` in blocks of ``page`` tokens.

    Block 0 is SGLang's padding. The allocator replaces SGLang's token and paged allocators, with
    the same calls and the same counts. The groups decide which slots a call returns.

    Slots that are freed on a device come to the host later. Until then they count as available, and
    an allocation waits for them only if no other slots are left.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        device: str,
        kvcache: object,
        need_sort: bool,
        *,
        expected_tokens: int,
        beyond: int = 0,
    ) -> None:
        """Creates the allocator from the arguments of SGLang's allocators and further ones.

        Args:
            expected_tokens: see :class:`~sgl_ext.memory.block_groups.BlockGroups`.
            beyond: number of blocks behind these that may be added later.
        """
        super().__init__(size, page_size, dtype, device, kvcache, need_sort)
        self.num_pages = size // page_size
        self.groups = BlockGroups(
            self.num_pages + beyond, page=page_size, first=1, expected_tokens=expected_tokens,
            near=self.num_pages if beyond else None,
        )  # fmt: skip
        self.groups.withdraw(1 + self.num_pages, 1 + self.num_pages + beyond)
        self.on_allocate: Callable[[int], None] | None = None
        """Function that is called with the end of the highest block in use so far."""
        self.in_flight: BlocksInFlight | None = None
        """Blocks that are read or written for owners that have released them."""
        self.streams = Streams()
        """Streams on which the owners of slots use them."""
        self.promised = 0
        """Tokens that a request can count on; some may come only while it waits for them."""
        self._high = 0
        self._owners: Owners | None = None
        self.known = KnownSlots()
        self._freed = FreedSlots()

    @contextmanager
    def serving(self, owners: Owners) -> Iterator[None]:
        """Names the requests that the calls inside the block are for."""
        self._owners = owners
        try:
            yield
        finally:
            self._owners = None

    def close_rows(self, rows: Sequence[int]) -> None:
        """Frees the reservations of these rows, whose requests have ended."""
        for row in rows:
            self.groups.close(row)
            self.known.extend(row, None)

    def settle(self, *, wait: bool = True) -> None:
        """Releases the blocks of slots that were freed on the device.

        Args:
            wait: whether to wait for slots that have not come to the host yet.
        """
        for slots in self._freed.take(wait=wait):
            self.groups.release(runs_of(np.sort(slots // self.page_size)))

    @property
    def copying(self) -> bool:
        """True if blocks may still be copied that their owners have released."""
        return self.in_flight is not None and self.in_flight.pending > 0

    def shrink(self, blocks: int) -> bool:
        """Removes the last ``blocks`` blocks.

        Returns False, with nothing changed, if one is in use or a copy is in progress.
        """
        self.settle()
        if self.copying or not self.groups.shrink(blocks):
            return False
        # The blocks may have other memory when they are added again.
        self._high = min(self._high, self.groups.first + self.groups.blocks)
        return True

    def withdraw(self, start: int, end: int) -> int:
        """Removes the blocks of ``[start, end)`` that are not in use.

        Returns the number of blocks that are in use. Waits for copies that still read or write the
        removed blocks.
        """
        self.settle()
        in_use = self.groups.withdraw(start, end)
        if self.in_flight is not None and self.in_flight.pending:
            self.in_flight.wait(np.arange(start, end), COPY_DEADLINE_S)
        return in_use

    # --- SGLang's interface ----------------------------------------------------------------------

    @property
    def free_pages(self) -> torch.Tensor:
        """Free pages, for SGLang's check of page invariants.

        The check skips an allocator whose free pages are None.
        """
        return self.get_all_free_pages()

    @free_pages.setter
    def free_pages(self, _value: None) -> None:
        """Ignores the list of the base class: the groups know the free pages."""

    def available_size(self) -> int:
        return (self.groups.available + len(self._freed)) * self.page_size

    def max_new_tokens_for_memory(
        self, input_tokens: int, max_new_tokens: int, *, token_capacity: int, **kwargs: object
    ) -> int | None:
        token_capacity = max(token_capacity, self.promised)
        # SGLang would queue such a prompt, never admit it, and admit nothing behind it.
        if input_tokens + self.page_size >= token_capacity:
            return None
        clipped: int | None = super().max_new_tokens_for_memory(
            input_tokens, max_new_tokens, token_capacity=token_capacity, **kwargs
        )
        return clipped

    def get_all_free_pages(self) -> torch.Tensor:
        self.settle()
        runs = [*self.groups.free_runs(), *self.groups.unused_runs().values()]
        return torch.cat([torch.arange(0), *(torch.arange(s, s + n) for s, n in runs)])

    def merge_and_sort_free(self) -> None:
        """Does nothing: free groups are always merged and sorted."""

    def clear(self) -> None:
        self.free_group: list[torch.Tensor] | None = None
        self._freed.clear()
        self.groups.clear()

    def resize(self, config: object) -> None:
        raise NotImplementedError(
            "SGLang resizes pools after graph capture only if it allocates their memory itself; "
            'set {"memory": {"layout": "layer_major"}} to use this'
        )

    def alloc(self, need_size: int) -> torch.Tensor | None:
        blocks = need_size // self.page_size  # whole pages only, as in SGLang's allocators
        if self.page_size == 1 and self._owners is not None:
            rows, counts = self._owners()
            if sum(counts) == need_size:
                return self._slots_of(rows, counts)
        runs = self._allocate([(None, blocks)])
        return None if runs is None else self._slots(runs[0])

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        page = self.page_size
        before = prefix_lens_cpu.tolist()
        after = seq_lens_cpu.tolist()
        counts = [-(-b // page) - -(-a // page) for a, b in zip(before, after, strict=True)]
        rows = self._rows(len(counts))
        runs = self._allocate(list(zip(rows, counts, strict=True)))
        if runs is None:
            return None
        if all(b % page == 0 for b in before):
            # Whole pages, of which only the last ones are not filled.
            numbers = [
                _slots_in(each, page)[: a - b]
                for each, b, a in zip(runs, before, after, strict=True)
            ]
            return self._extend(rows, numbers, [run for each in runs for run in each])
        parts = []
        for index, request in enumerate(runs):
            # The rest of a request's last page comes first, then its new pages.
            new = after[index] - before[index]
            head = min(-before[index] % page, new)
            if head:
                parts.append(last_loc[index] + torch.arange(1, head + 1, device=self.device))
            if new > head:
                parts.append(self._slots(request)[: new - head])
            self.known.extend(rows[index], None)
        return torch.cat(parts) if parts else self._slots([])

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        new = (seq_lens_cpu.numpy() - 1) % self.page_size == 0
        following = last_loc.to(torch.int64) + 1
        if not new.any():
            return following
        rows = self._rows(len(new))
        where = np.flatnonzero(new)
        blocks = self._append([rows[i] for i in where.tolist()])
        if blocks is None:
            return None
        slots = torch.as_tensor(blocks, dtype=torch.int64) * self.page_size
        places = upload(torch.from_numpy(where), self.device)
        following[places] = upload(slots, self.device)
        return following

    def free(self, free_index: torch.Tensor) -> None:
        """Frees the blocks of these slots, each of which is named once.

        Raises:
            ValueError: a slot is named twice, or its block is not in use: it was freed twice.
        """
        if self.page_size == 1:
            self._free(free_index)
            return
        slots = np.sort(self.known.on_host(free_index))
        if (slots[1:] == slots[:-1]).any():
            twice = int(slots[1:][slots[1:] == slots[:-1]][0])
            raise ValueError(f"slot {twice} is freed twice in one call")
        blocks = slots // self.page_size
        # A block is released once, even if several of its slots are freed.
        self._release(blocks[np.diff(blocks, prepend=-1) != 0])

    def free_group_end(self) -> None:
        pending, self.free_group = self.free_group, None
        self._freed.end_group()
        if pending:
            self._release(np.sort(torch.cat(pending).numpy()))

    def free_page_ids(self, page_ids: torch.Tensor) -> None:
        """Frees whole pages by number. No page may be named twice."""
        self._free(page_ids * self.page_size)

    def unused(self, slots: torch.Tensor) -> int | None:
        """Returns the first block of whole pages of ``slots`` that is not in use, or None.

        A block whose release waits for the end of a group counts as not in use.
        """
        blocks = on_host(slots[:: self.page_size]) // self.page_size
        if self.free_group:
            freed = np.isin(blocks, torch.cat(self.free_group).numpy())
            if freed.any():
                return int(blocks[freed][0])
        return self.groups.unused(blocks)

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        if free_index.numel() and start_pos % self.page_size:
            raise ValueError(
                f"segment start {start_pos} is not a multiple of the page size {self.page_size}"
            )
        # One slot of each page is enough to name the page, because a segment begins with a page.
        self._free(free_index[:: self.page_size])

    def get_cpu_copy(
        self, indices: object, mamba_indices: object = None, req_pool_index: object = None
    ) -> object:
        return self._kvcache.get_cpu_copy(
            indices, mamba_indices=mamba_indices, req_pool_index=req_pool_index
        )

    def load_cpu_copy(
        self,
        kv_cache_cpu: object,
        indices: object,
        mamba_indices: object = None,
        req_pool_index: object = None,
    ) -> object:
        return self._kvcache.load_cpu_copy(
            kv_cache_cpu, indices, mamba_indices=mamba_indices, req_pool_index=req_pool_index
        )

    # --- internal --------------------------------------------------------------------------------

    def _free(self, slots: torch.Tensor) -> None:
        """Frees the blocks of slots, at most one of each block."""
        if self.device == "cpu":
            self._release(np.sort(slots.numpy() // self.page_size))
        elif len(slots):
            self._freed.add(slots, grouped=self.free_group is not None)

    def _release(self, blocks: Slots) -> None:
        """Releases blocks in ascending order. A block that is named twice was freed twice."""
        if self.free_group is not None:
            self.free_group.append(torch.from_numpy(blocks))
        elif len(blocks):
            self.groups.release(runs_of(blocks))

    def _allocate(
        self, requests: Sequence[tuple[int | None, int]]
    ) -> Sequence[Sequence[Run]] | None:
        """Allocates blocks to rows; waits for freed slots only if there are no others."""
        return self._with_freed(lambda: self.groups.allocate(requests))

    def _with_freed(self, attempt: Callable[[], _Result | None]) -> _Result | None:
        """Returns the result of an allocation, which is tried again if freed slots may help."""
        self.settle(wait=False)
        result = attempt()
        if result is None and self._freed:
            self.settle()
            result = attempt()
        return result

    def _rows(self, count: int) -> Sequence[int | None]:
        if self._owners is not None:
            rows, _ = self._owners()
            if len(rows) == count:
                return rows
        return [None] * count

    def _slots_of(self, rows: Sequence[int], counts: Sequence[int]) -> torch.Tensor | None:
        if all(count == 1 for count in counts):  # a decode step
            blocks = self._append(rows)
            if blocks is None:
                return None
            for row in rows:  # or the last part of a prompt: earlier slots are not its slots
                self.known.extend(row, None)
            return upload(torch.tensor(blocks, dtype=torch.int64), self.device)
        runs = self._allocate(list(zip(rows, counts, strict=True)))
        if runs is None:
            return None
        numbers = [_slots_in(each, 1) for each in runs]
        return self._extend(rows, numbers, [run for each in runs for run in each])

    def _extend(
        self, rows: Sequence[int | None], slots: Sequence[Slots], runs: Sequence[Run]
    ) -> torch.Tensor:
        """Returns the new slots of all rows, and remembers those of each row."""
        for row, each in zip(rows, slots, strict=True):
            self.known.extend(row, each)
        return self._given(np.concatenate(slots) if slots else np.empty(0, np.int64), runs)

    def _append(self, rows: Sequence[int | None]) -> Sequence[int] | None:
        named = [row for row in rows if row is not None]
        if len(named) == len(rows):
            blocks = self._with_freed(lambda: self.groups.append(named))
        else:
            runs = self._allocate([(row, 1) for row in rows])
            blocks = None if runs is None else [run[0].start for run in runs]
        if blocks:
            self._note(max(blocks) + 1)
            if self.copying:
                self._fence(np.asarray(blocks))
        return blocks

    def _slots(self, runs: Sequence[Run]) -> torch.Tensor:
        """Returns the slots of ``runs`` in order, int64 ``[blocks * page]``."""
        return self._given(_slots_in(runs, self.page_size), runs)

    def _given(self, slots: Slots, runs: Sequence[Run]) -> torch.Tensor:
        """Returns ``slots``, which lie in ``runs``, on the device; their owner may use them."""
        if runs:
            self._note(max(start + length for start, length in runs))
            if self.copying:
                self._fence(_slots_in(runs, 1))
        given = upload(torch.from_numpy(slots), self.device)
        self.known.allocated(given, slots)
        return given

    def _fence(self, blocks: Slots) -> None:
        """Makes the next owner's use of blocks wait for copies that still read or write them."""
        if self.in_flight is not None:
            self.in_flight.fence(blocks, self.streams.current(), COPY_DEADLINE_S)

    def _note(self, end: int) -> None:
        if end > self._high and self.on_allocate is not None:
            self._high = end
            self.on_allocate(end)


def _slots_in(runs: Sequence[Run], page: int) -> Slots:
    """Returns the slots of runs of blocks, in order, int64 ``[blocks * page]``."""
    parts = [np.arange(start * page, (start + length) * page) for start, length in runs]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
