"""Who is swapped when: FastSwitch's setting (§4.1-4.2), simulated iteration by iteration.

LLaMA-8B on an A10: 2,560 blocks of 16 tokens (2 MiB each: 24 GB * 0.9 less 16 GB of weights and
0.6 GB of activations). An iteration takes 28 ms for the weights (16 GB at 600 GB/s), 0.22 us for
each token of context (128 KiB), 0.23 ms for each prompt token (16 GFLOP at 70 TFLOP/s); swapping
takes none, so that the trace depends on no allocator. Prompts are not chunked. 1 % of the blocks
stay free when a request is admitted, at most 256 run (vLLM's defaults); the order is strictly by
priority, which changes every 50 iterations.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from sgl_ext.bench.data.texts import sharegpt_conversations

BLOCKS = 2560
PAGE = 16
_MAX_RUNNING = 256
_WATERMARK = 0.01
_UPDATE = 50  # iterations between changes of priority
_STAY = 0.8  # Markov: probability that who was served stays preferred
_THINK_S = 10.0  # mean of the exponential pause between a user's turns

Pattern = Literal["random", "markov"]


class Admit(NamedTuple):
    owner: int
    blocks: int
    swapped_in: bool


class Step(NamedTuple):
    """What one iteration does to the pool, in this order; owners are conversations."""

    swap_out: list[int]
    admit: list[Admit]
    append: list[int]
    close: list[int]
    """Their turn has ended; their blocks stay, or are swapped out in the next step."""
    free: list[int]
    """Their conversation has ended."""


@dataclass(eq=False)
class _Conversation:
    owner: int
    turns: list[tuple[int, int]]  # tokens of each prompt and answer
    priority: float
    turn: int = 0
    prompt: int = 0  # tokens still to be prefilled
    answer: int = 0  # tokens still to be generated
    tokens: int = 0
    blocks: int = 0
    resident: bool = False
    swapped: bool = False
    served: bool = False

    def begin_turn(self) -> None:
        self.prompt, self.answer = self.turns[self.turn]

    @property
    def needed(self) -> int:
        """Blocks after the next iteration."""
        return -(-(self.tokens + self.prompt + 1) // PAGE)


def sharegpt_turns(count: int, seed: int) -> list[list[tuple[int, int]]]:
    """Tokens of prompt and answer of each turn, of ``count`` conversations of several turns.

    A token is taken as four characters.
    """
    lengths = (
        [-(-len(text) // 4) or 1 for text in conversation]
        for conversation in sharegpt_conversations()
    )
    several = [
        list(zip(tokens[::2], tokens[1::2], strict=False)) for tokens in lengths if len(tokens) >= 4
    ]
    return random.Random(seed).sample(several, count)  # noqa: S311


def simulate(
    conversations: Sequence[list[tuple[int, int]]],
    pattern: Pattern,
    *,
    seed: int,
    rate: float = 1.0,
    keep_idle: bool = False,
) -> Iterator[Step]:
    """Steps of serving ``conversations``, which arrive as a Poisson process.

    Args:
        pattern: of priorities: drawn anew at each update, or with ``markov`` such that who was
            served since the last one mostly stays before who was not.
        rate: conversations that begin in a second.
        keep_idle: whether KV stays between turns until its blocks are needed, as in a radix
            cache; else it is swapped out at the end of a turn, as FastSwitch does.
    """
    chance = random.Random(seed)  # noqa: S311
    now, coming = 0.0, []
    for owner, turns in enumerate(conversations):
        now += chance.expovariate(rate)
        conversation = _Conversation(owner, turns, chance.random())
        conversation.begin_turn()
        coming.append((now, owner, conversation))
    ready: list[_Conversation] = []
    idle: dict[int, _Conversation] = {}  # resident between turns, least recently used first
    now, used, iteration = 0.0, 0, 0
    leaving: list[int] = []
    while ready or coming:
        if not ready:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            ready.append(heapq.heappop(coming)[2])
            idle.pop(ready[-1].owner, None)
        if iteration % _UPDATE == 0:
            for each in ready:
                preferred = chance.random() < (_STAY if each.served else 1 - _STAY)
                late = pattern == "markov" and not preferred
                each.priority = chance.random() + late
        iteration += 1
        ready.sort(key=lambda each: each.priority)
        running = _select(ready)
        step = Step(leaving, [], [], [], [])
        leaving = []

        for each in ready:
            each.served = False
        for each in running:
            each.served = True
        excess = used - BLOCKS
        excess += sum(each.needed - each.blocks * each.resident for each in running)
        victims = [each for each in reversed(ready) if each.resident and not each.served]
        for each in [*idle.values(), *victims]:
            if excess <= 0:
                break
            excess -= each.blocks
            used -= each.blocks
            each.resident, each.swapped = False, True
            idle.pop(each.owner, None)
            step.swap_out.append(each.owner)

        time = 0.028
        for each in running:
            if each.swapped:
                step.admit.append(Admit(each.owner, each.blocks, True))
                used += each.blocks
            more = each.needed - each.blocks
            if each.prompt:
                step.admit.append(Admit(each.owner, more, False))
            elif more:
                step.append.append(each.owner)
            time += each.prompt * 0.23e-3
            used += more
            each.blocks += more
            each.tokens += each.prompt + 1
            each.answer -= 1
            each.prompt, each.resident, each.swapped = 0, True, False
            time += each.tokens * 0.22e-6
        now += time

        for each in [each for each in running if each.answer <= 0]:
            ready.remove(each)
            each.turn += 1
            if each.turn == len(each.turns):
                step.free.append(each.owner)
                used -= each.blocks
                continue
            each.served = False
            each.begin_turn()
            heapq.heappush(coming, (now + chance.expovariate(1 / _THINK_S), each.owner, each))
            step.close.append(each.owner)
            if keep_idle:
                idle[each.owner] = each
            else:
                leaving.append(each.owner)
                used -= each.blocks
                each.resident, each.swapped = False, True
        yield step


def _select(ready: Sequence[_Conversation]) -> list[_Conversation]:
    """Who runs next: in the order of priority, until one does not fit."""
    running: list[_Conversation] = []
    total = 0
    for each in ready[:_MAX_RUNNING]:
        total += each.needed
        if total > BLOCKS * (1 if each.resident and each.served else 1 - _WATERMARK):
            break
        running.append(each)
    return running
