"""Loads that land layer by layer while a forward computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sgl_ext.memory.streams import Streams
from sgl_ext.memory.transfer import Ticket, TransferCancelledError, TransferError


def layer_groups(layers: int) -> Iterator[tuple[int, int]]:
    """Yields layers ``(first, end)`` in groups of 1, 2, 4...

    Growing groups need few copies, and the first one lands early.
    """
    begin, size = 0, 1
    while begin < layers:
        # A remainder smaller than this group joins it: small copies are inefficient.
        end = begin + size if layers - begin - size >= size else layers
        yield begin, end
        begin, size = end, 2 * size


class LayerLoads:
    """Layer-wise completion of loads, which a forward waits for; SGLang's ``layer_done_counter``.

    There is one load for each batch that is being built or run. A ticket covers a group of layers.
    On a device with streams, the forward's stream waits and not the host.

    Args:
        groups: Layers ``(first, end)`` of each group, as from :func:`layer_groups`.
        deadline: Seconds that a wait for one ticket may take.
        streams: Streams whose work uses the loaded layers.
    """

    def __init__(
        self,
        groups: Sequence[tuple[int, int]],
        deadline: float,
        streams: Streams | None = None,
    ) -> None:
        self._streams = streams or Streams()
        self._fenced: set[tuple[int, int]] = set()
        """Load and group that the current forward waits for already."""
        self._group_of = [at for at, (begin, end) in enumerate(groups) for _ in range(begin, end)]
        self._deadline = deadline
        self._loads: dict[int, list[Ticket]] = {}
        self._late: set[int] = set()
        """Loads that a forward did not wait for to the end."""
        self._next = 0
        self.consumer_index = -1
        """Number of the load that the next or running forward depends on; -1 for none."""

    def start(self, tickets: list[Ticket]) -> int:
        """Registers a load with one ticket for each group of layers, and returns its number."""
        index, self._next = self._next, self._next + 1
        self._loads[index] = tickets
        return index

    def set_consumer(self, index: int) -> None:
        """Sets the load that the next forward depends on; -1 for none."""
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """Makes the forward wait until ``layer`` of the consumer's load has landed.

        It goes on if the load has failed or passed the deadline, which :meth:`finish` reports.
        """
        tickets = self._loads.get(self.consumer_index)
        if tickets is None:
            return
        group = self._group_of[layer]
        if (step := (self.consumer_index, group)) not in self._fenced:
            self._fenced.add(step)
            try:
                tickets[group].fence(self._streams.current(), self._deadline)
            except TimeoutError:
                self._late.add(self.consumer_index)
            except (TransferError, TransferCancelledError):
                pass

    def finish(self, index: int) -> float | None:
        """Waits for a whole load and forgets it.

        Returns:
            The seconds of the slowest ticket; None if a ticket failed or was cancelled, or landed
            after the forward had stopped waiting for it.

        Raises:
            TimeoutError: A copy is still in progress, and its memory in use.
        """
        tickets = self._loads.get(index, [])
        landed = [_landed(ticket, self._deadline) for ticket in tickets]
        if not all(ticket.poll() for ticket in tickets):
            # The load stays known: a second call must not take it for one that has landed.
            raise TimeoutError(f"a copy from host memory took over {self._deadline} s")
        self._loads.pop(index, None)
        in_time = index not in self._late
        self._late.discard(index)
        self._fenced = {step for step in self._fenced if step[0] != index}
        slowest = max((each.seconds for each in tickets), default=0.0)
        return slowest if all(landed) and in_time else None

    def reset(self) -> None:
        """Waits for all loads and forgets them.

        Raises:
            TimeoutError: As for :meth:`finish`.
        """
        for index in list(self._loads):
            self.finish(index)
        self.consumer_index = -1


def _landed(ticket: Ticket, deadline: float) -> bool:
    try:
        ticket.wait(deadline)
    except Exception:  # failed, cancelled or too slow: the caller reports it
        return False
    return True
