"""Compute and I/O pointers with random prefixes, rates and failures, on a simulated clock."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_ext.planning.compute_cost import ComputeCost
from sgl_ext.planning.costs import COMPUTE, Costs
from sgl_ext.planning.load_cost import LoadCost
from sgl_ext.planning.parts import gives_way, next_part
from sgl_ext.planning.pointers import Pointers, Stretch
from sgl_ext.planning.want import Positions

PAGE = 16
UNIT = 8
"""Maximum size of a load, in pages."""
AT = Positions(range(0, 20 * PAGE, PAGE), PAGE)
"""Positions of 20 pages at the front of a prompt."""


class Clock:
    """Simulation of one request that is restored by computing and by one channel per tier."""

    def __init__(self, pointers: Pointers, real: Costs, believed: Costs) -> None:
        self.pointers = pointers
        self.real = real
        self.believed = believed
        self.now = 0.0
        self.computed: list[int] = []
        self.twice = 0
        self.forwards = 0
        self._landing: dict[str, float] = {}
        self._began: dict[str, float] = {}

    def begin_loads(self) -> None:
        for stretch in self.pointers.stretches:
            if (taken := self.pointers.take(stretch.tier, UNIT)) is not None:
                self._began[stretch.tier] = self.now
                seconds = self.real.loads[stretch.tier].seconds((taken[1] - taken[0]) * PAGE)
                self._landing[stretch.tier] = self.now + seconds

    def land(self, until: float, lost: set[int]) -> None:
        while self._landing and min(self._landing.values()) <= until:
            tier = min(self._landing, key=self._landing.__getitem__)
            self.now = max(self.now, self._landing.pop(tier))
            one = self.pointers.load(tier)
            assert one is not None
            pages = range(one.end, one.end + one.flying)
            self.pointers.land(tier, [page not in lost for page in pages])
            self.begin_loads()
        self.now = max(self.now, until)

    def run(self, lost: set[int]) -> float:
        """Returns the seconds until the prefix is restored."""
        pointers = self.pointers
        self.begin_loads()
        at = Positions(range(0, pointers.end * PAGE, PAGE), PAGE)
        while True:
            flying = pointers.flying
            position = next_part(
                pointers,
                at,
                self.believed,
                pointers.front * PAGE,
                flying_for=self.now - self._began[flying.tier] if flying else 0.0,
                busy=0.0,
            )
            until = None if position is None else position // PAGE
            if until is None:
                self.land(min(self._landing.values()), lost)
                continue
            loaded = {page for first, last in pointers.loaded() for page in range(first, last)}
            on_their_way = {
                page for one in pointers.stretches for page in range(one.end, one.end + one.flying)
            }
            front = pointers.front
            pages = [page for page in range(front, until) if page not in loaded]
            self.computed += pages
            self.twice += len(on_their_way.intersection(pages))
            pointers.compute(until)
            if pages:
                self.forwards += 1
                seconds = self.real.compute.seconds(pages[0] * PAGE, (pages[-1] + 1) * PAGE)
                self.land(self.now + seconds, lost)
            if until == pointers.end:
                return self.now


def costs(overhead: float, per_token: float, per_pair: float, load: float) -> Costs:
    loads = {tier: LoadCost(1e-4, load) for tier in ("ssd", "remote")}
    return Costs(ComputeCost(overhead, per_token, per_pair), loads, chunk=512)


@settings(deadline=None)
@given(
    front=st.integers(0, 40),
    gap=st.integers(0, 40),
    pages=st.integers(1, 400),
    remote=st.integers(0, 100),
    load=st.floats(1e-6, 1e-2),
    wrong=st.floats(0.2, 5),
    lost=st.sets(st.integers(0, 600), max_size=30),
)
def test_every_page_is_either_computed_or_loaded_once(
    front: int,
    gap: int,
    pages: int,
    remote: int,
    load: float,
    wrong: float,
    lost: set[int],
) -> None:
    begin = front + gap
    stretches = [Stretch("ssd", begin, begin + pages)]
    if remote:
        stretches.append(Stretch("remote", begin + pages, begin + pages + remote))
    pointers = Pointers(front, stretches)
    real = costs(5e-3, 2e-4, 1e-8, load)
    clock = Clock(pointers, real, costs(5e-3, 2e-4, 1e-8, load * wrong))
    clock.run(lost)
    came = {page for page in range(front, pointers.end) if pointers.came(page)}
    assert len(clock.computed) == len(set(clock.computed))
    assert not came.intersection(clock.computed)
    assert came.union(clock.computed) == set(range(front, pointers.end))
    assert not came.intersection(lost)
    assert clock.twice <= 512 // PAGE
    assert pointers.settled


@pytest.mark.parametrize("ratio", [0.25, 0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("tokens", [4096, 8192, 32768])
@pytest.mark.parametrize("texts", [1, 8])
def test_restoring_takes_little_longer_than_the_bound(
    ratio: float, tokens: int, texts: int
) -> None:
    """Restores one prefix, or as many tokens of several texts in a row."""
    compute = ComputeCost(2e-3, 2e-4, 5e-9)
    whole = compute.in_chunks(0, tokens, 512)
    load = LoadCost(1e-4, ratio * whole / tokens)
    believed = Costs(compute, {"ssd": load}, 512)
    each = tokens // PAGE // texts
    pointers = Pointers(0, [Stretch("ssd", n * each, (n + 1) * each) for n in range(texts)])
    clock = Clock(pointers, believed, believed)
    seconds = clock.run(set())
    loading = load.seconds(tokens)
    assert clock.forwards <= tokens // 512 + 8
    assert seconds <= 1.06 * whole * loading / (whole + loading)


def test_nothing_is_computed_if_loading_is_faster_than_a_forward() -> None:
    """Uses a tier that loads the prefix in less than the overhead of a forward."""
    believed = Costs(ComputeCost(5e-2, 1e-3), {"ssd": LoadCost(0.0, 1e-6)}, 512)
    pointers = Pointers(0, [Stretch("ssd", 0, 64)])
    clock = Clock(pointers, believed, believed)
    clock.run(set())
    assert clock.computed == []


def test_pages_of_a_hung_load_are_computed() -> None:
    believed = costs(5e-3, 2e-4, 1e-8, 1e-4)
    pointers = Pointers(0, [Stretch("ssd", 0, 8)])
    assert pointers.take("ssd", 8) == (0, 8)
    expected = believed.loads["ssd"].seconds(8 * PAGE)
    patience = believed.compute.seconds(0, 8 * PAGE)
    waits = {
        late: next_part(pointers, AT, believed, 0, flying_for=expected + late, busy=0.0)
        for late in (0.0, 0.9 * patience, 1.1 * patience)
    }
    assert [*waits.values()] == [None, None, 8 * PAGE]
    pointers.compute(8)
    assert pointers.land("ssd", [True] * 8) == 0  # too late: the pages are computed already
    assert not any(map(pointers.came, range(8)))


def test_a_channel_that_serves_other_requests_is_not_waited_for() -> None:
    believed = costs(5e-3, 2e-4, 1e-8, 1e-6)
    pointers = Pointers(0, [Stretch("ssd", 0, 20)])
    stop = next_part(pointers, AT, believed, 0, flying_for=0.0, busy=float("inf"))
    assert stop == 20 * PAGE


@pytest.mark.parametrize(
    ("others", "load", "gives"),
    [
        (0, 1.0, False),
        (1, 0.9, True),  # computing a part would delay one prompt by more than it saves
        (1, 1.5, False),
        (2, 1.5, True),
        (9, 20.0, False),
    ],
)
def test_a_prompt_gives_way_if_computing_it_delays_others_by_more_than_it_saves(
    others: int, load: float, gives: bool
) -> None:
    """Loading a token takes ``load`` times as long as computing it."""
    believed = costs(0.0, 1e-3, 0.0, load * 1e-3)
    pointers = Pointers(2, [Stretch("ssd", 4, 20)])
    found = gives_way(pointers, AT, believed, 0, busy=0.0, others=others, key="a")
    assert found == gives
    assert [kind for kind, _ in believed.decisions.kinds()] == ["compute_or_give_way"] * bool(
        others
    )


def test_a_prompt_whose_loads_make_no_progress_does_not_give_way() -> None:
    believed, pointers = costs(0.0, 1e-3, 0.0, 1e-4), Pointers(0, [Stretch("ssd", 0, 20)])
    arguments = (pointers, AT, believed, 0)
    assert gives_way(*arguments, busy=0.0, others=5, key="a")
    assert not gives_way(*arguments, busy=float("inf"), others=5, key="a")
    assert pointers.take("ssd", 20)
    assert not gives_way(*arguments, busy=0.0, others=5, key="a")  # all is being loaded


@pytest.mark.parametrize(
    "stretches",
    [[], [Stretch("ssd", 2, 5)], [Stretch("ssd", 3, 5), Stretch("remote", 4, 8)]],
)
def test_invalid_stretches_are_rejected(stretches: list[Stretch]) -> None:
    with pytest.raises(ValueError, match=r"overlap|expected pages to load"):
        Pointers(3, stretches)


@settings(deadline=None)
@given(
    front=st.integers(0, 10_000),
    length=st.integers(1, 100_000),
    per_pair=st.sampled_from([0.0, 1e-9, 1e-7]),
    load=st.floats(1e-7, 1e-2),
    busy=st.floats(0, 100),
)
def test_computing_and_loading_end_together_at_the_meeting(
    front: int, length: int, per_pair: float, load: float, busy: float
) -> None:
    believed = costs(1e-3, 1e-4, per_pair, load)
    back = front + length
    at = believed.meeting(front, back, "ssd", busy)
    assert front <= at <= back
    if front < at < back:
        single = believed.compute.seconds(front, at)
        chunked = believed.compute.work(front, at) + believed.compute.overhead * (at - front) / 512
        loading = busy + (back - at) * load
        assert (single if at - front <= 512 else chunked) == pytest.approx(loading, rel=1e-3)


def test_loads_of_a_restoration_have_the_latency_of_their_channel() -> None:
    """Two loads of half the size take one more latency, so that more is computed meanwhile."""
    believed = costs(0.0, 1e-3, 0.0, 1e-3)
    believed.loads["ssd"] = LoadCost(0.128, 1e-3)
    found = []
    for believed.unit in (None, 256, 128):
        at = believed.meeting(0, 1000, "ssd")
        loads = 0.0 if believed.unit is None else (1000 - at) / believed.unit
        assert believed.compute.seconds(0, at) == pytest.approx(
            (1000 - at) * 1e-3 + loads * 0.128, rel=1e-3
        )
        found.append(believed.remaining(0, 1000, 1000, 1000, "ssd"))
    assert found == sorted(found)
    assert found[0] == pytest.approx(0.5)


def test_observed_forwards_determine_the_cost_of_attention() -> None:
    """Predicts forwards at short and at long positions, although one observation is an outlier."""
    true = ComputeCost(5e-3, 4e-4, 2e-7)
    found = costs(0.0, 1e-3, 0.0, 1.0)
    for begin in range(0, 7168, 512):
        found.computed(begin, begin + 512, true.seconds(begin, begin + 512))
    found.computed(512, 1024, 5.0)
    found.computed(0, 64, true.seconds(0, 64))
    for begin, end in ((0, 256), (0, 512), (1024, 1100), (6144, 7168)):
        expected = true.seconds(begin, end)
        assert found.compute.seconds(begin, end) == pytest.approx(expected, rel=0.15)


def test_similar_forwards_determine_only_their_rate() -> None:
    found = costs(0.0, 1.0, 0.0, 1.0)
    for _ in range(5):
        found.computed(0, 512, 0.5)
    assert found.compute.seconds(0, 100) == pytest.approx(0.5 * 100 / 512, rel=1e-3)
    assert found.compute.seconds(4096, 4608) == pytest.approx(0.5, rel=1e-3)


def test_observations_correct_estimated_costs() -> None:
    unmeasured = costs(0.0, 1.0, 0.0, 1.0)
    unmeasured.computed(0, 100, 0.1)
    unmeasured.loaded("ssd", 100, 0.2)
    assert unmeasured.compute.seconds(0, 100) == pytest.approx(0.1)
    assert unmeasured.loads["ssd"].seconds(100) == pytest.approx(0.2)
    measured = costs(0.0, 1.0, 0.0, 1.0)
    measured.measured = frozenset({COMPUTE, "ssd"})
    measured.computed(0, 100, 1e6)  # an outlier
    assert measured.compute.seconds(0, 100) == pytest.approx(100)
    for _ in range(40):
        measured.computed(0, 100, 50.0)
    assert measured.compute.seconds(0, 100) == pytest.approx(50, rel=1e-2)
