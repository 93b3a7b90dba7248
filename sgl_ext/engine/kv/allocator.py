"""SGLang's KV allocator interface over :class:`~sgl_ext.memory.block_groups.BlockGroups`.

SGLang asks for slots without naming the requests. The batch that is being prepared names them, so
:mod:`~sgl_ext.engine.kv.install` passes them to the allocator (:meth:`BlockGroupAllocator.serving`)
before SGLang asks. Other calls (external tiers, speculative drafts) get slots that belong to no
group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator

from sgl_ext.memory.block_groups import BlockGroups, Run
from sgl_ext.memory.in_flight import BlocksInFlight
from sgl_ext.memory.runs import runs_of
from sgl_ext.memory.tickets import COPY_DEADLINE_S

Owners = Callable[[], tuple[Sequence[int], Sequence[int]]]
"""Function that returns the batch's rows in the request pool, and the tokens of each row."""


class BlockGroupAllocator(BaseTokenToKVPoolAllocator):
    """Allocator of slots ``[page, size + page)`` in blocks of ``page`` tokens.

    Block 0 is SGLang's padding. The allocator replaces SGLang's token and paged allocators, with
    the same calls and the same counts. The groups decide which slots a call returns.
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
        self.promised = 0
        """Tokens that a request can count on; some may come only while it waits for them."""
        self._high = 0
        self._owners: Owners | None = None

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

    @property
    def copying(self) -> bool:
        """True if blocks may still be copied that their owners have released."""
        return self.in_flight is not None and self.in_flight.pending > 0

    def shrink(self, blocks: int) -> bool:
        """Removes the last ``blocks`` blocks.

        Returns False, with nothing changed, if one is in use or a copy is in progress.
        """
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
        return self.groups.available * self.page_size

    def max_new_tokens_for_memory(
        self, input_tokens: int, max_new_tokens: int, *, token_capacity: int, **kwargs: object
    ) -> int | None:
        clipped: int | None = super().max_new_tokens_for_memory(
            input_tokens,
            max_new_tokens,
            token_capacity=max(token_capacity, self.promised),
            **kwargs,
        )
        return clipped

    def get_all_free_pages(self) -> torch.Tensor:
        runs = [*self.groups.free_runs(), *self.groups.unused_runs().values()]
        return torch.cat([torch.arange(0), *(torch.arange(s, s + n) for s, n in runs)])

    def merge_and_sort_free(self) -> None:
        """Does nothing: free groups are always merged and sorted."""

    def clear(self) -> None:
        self.free_group: list[torch.Tensor] | None = None
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
        runs = self.groups.allocate([(None, blocks)])
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
        runs = self.groups.allocate(list(zip(rows, counts, strict=True)))
        if runs is None:
            return None
        if all(a % page == 0 and b % page == 0 for a, b in zip(before, after, strict=True)):
            return self._slots([run for request in runs for run in request])
        parts = []
        for index, request in enumerate(runs):
            # The rest of a request's last page comes first, then its new pages.
            new = after[index] - before[index]
            head = min(-before[index] % page, new)
            if head:
                parts.append(last_loc[index] + torch.arange(1, head + 1, device=self.device))
            if new > head:
                parts.append(self._slots(request)[: new - head])
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
        following[torch.from_numpy(where).to(self.device)] = slots.to(self.device)
        return following

    def free(self, free_index: torch.Tensor) -> None:
        """Frees the blocks of these slots, each of which is named once.

        Raises:
            ValueError: a slot is named twice, or its block is not in use: it was freed twice.
        """
        slots = np.sort(free_index.cpu().numpy())
        if self.page_size == 1:
            self._release(slots)
            return
        if (slots[1:] == slots[:-1]).any():
            twice = int(slots[1:][slots[1:] == slots[:-1]][0])
            raise ValueError(f"slot {twice} is freed twice in one call")
        blocks = slots // self.page_size
        # A block is released once, even if several of its slots are freed.
        self._release(blocks[np.diff(blocks, prepend=-1) != 0])

    def free_group_end(self) -> None:
        pending, self.free_group = self.free_group, None
        if pending:
            self._release(np.sort(torch.cat(pending).cpu().numpy()))

    def free_page_ids(self, page_ids: torch.Tensor) -> None:
        """Frees whole pages by number. No page may be named twice."""
        self._release(np.sort(page_ids.cpu().numpy()))

    def unused(self, slots: torch.Tensor) -> int | None:
        """Returns the first block of whole pages of ``slots`` that is not in use, or None.

        A block whose release waits for the end of a group counts as not in use.
        """
        blocks = slots[:: self.page_size].cpu().numpy() // self.page_size
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
        self.free(free_index[:: self.page_size])

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

    def _release(self, blocks: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """Releases blocks in ascending order. A block that is named twice was freed twice."""
        if self.free_group is not None:
            self.free_group.append(torch.from_numpy(blocks))
        elif len(blocks):
            self.groups.release(runs_of(blocks))

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
            return torch.tensor(blocks, dtype=torch.int64).to(self.device)
        runs = self.groups.allocate(list(zip(rows, counts, strict=True)))
        return None if runs is None else self._slots([run for request in runs for run in request])

    def _append(self, rows: Sequence[int | None]) -> Sequence[int] | None:
        named = [row for row in rows if row is not None]
        if len(named) == len(rows):
            blocks = self.groups.append(named)
        else:
            runs = self.groups.allocate([(row, 1) for row in rows])
            blocks = None if runs is None else [run[0].start for run in runs]
        if blocks:
            self._note(max(blocks) + 1)
            if self.in_flight is not None and self.in_flight.pending:
                self.in_flight.wait(np.asarray(blocks), COPY_DEADLINE_S)
        return blocks

    def _slots(self, runs: Sequence[Run]) -> torch.Tensor:
        """Returns the slots of ``runs`` in order, int64 ``[blocks * page]``."""
        if not runs:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        self._note(max(start + length for start, length in runs))
        if self.in_flight is not None and self.in_flight.pending:
            blocks = [np.arange(start, start + length) for start, length in runs]
            self.in_flight.wait(np.concatenate(blocks), COPY_DEADLINE_S)
        page = self.page_size
        parts = [torch.arange(start * page, (start + length) * page) for start, length in runs]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(self.device)

    def _note(self, end: int) -> None:
        if end > self._high and self.on_allocate is not None:
            self._high = end
            self.on_allocate(end)
