"""Order of the requests of many clients, each of which has several rounds."""

from __future__ import annotations

import random
from typing import NamedTuple


class Drawn(NamedTuple):
    """Request that is to be sent: a client, and the number of its round."""

    client: int
    round: int


class Rounds:
    """Requests that are ready to be sent, as in HiCache's ``bench_multiturn``.

    A client is ready for its next round when its last one was answered. The next request is that of
    a random ready client, so that a client's rounds are far apart.

    Args:
        clients: number of clients.
        rounds: rounds of each client.
        parallel: most requests that are unanswered at the same time.
        seed: seed of the drawing.
    """

    def __init__(self, clients: int, rounds: int, parallel: int, seed: int) -> None:
        self._rounds, self._parallel = rounds, parallel
        self._chance = random.Random(f"rounds/{seed}")  # noqa: S311
        self._ready = [Drawn(client, 0) for client in range(clients)]
        self._unanswered: dict[int, int] = {}
        """Round of each client that waits for an answer."""
        self.left = clients * rounds
        """Number of requests that were not drawn yet."""

    def draw(self) -> Drawn | None:
        """Returns the next request; None if no client is ready, or too many wait for answers."""
        if not self._ready or len(self._unanswered) == self._parallel:
            return None
        drawn = self._ready.pop(self._chance.randrange(len(self._ready)))
        self._unanswered[drawn.client] = drawn.round
        self.left -= 1
        return drawn

    def answered(self, client: int) -> None:
        """Makes a client ready for its next round, if it has one.

        Raises:
            KeyError: the client does not wait for an answer.
        """
        following = self._unanswered.pop(client) + 1
        if following < self._rounds:
            self._ready.append(Drawn(client, following))
