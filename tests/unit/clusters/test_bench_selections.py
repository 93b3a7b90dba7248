"""Arrangements of ``bench clusters --part selections``: what is stored, and what is reported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_stored import GEOMETRY, recorded_context

from sgl_ext.bench.clusters.samples import device_directories
from sgl_ext.bench.clusters.selections import (
    ARRANGEMENTS,
    ENTRY,
    OURS,
    PAGES,
    POSITION,
    Counts,
    Measured,
    add_answers,
    add_speeds,
    arranged,
)
from sgl_ext.bench.harness.report import Report
from sgl_ext.clusters.files import own_folders
from sgl_ext.clusters.placement import Blocks
from sgl_ext.clusters.stored import Stored

BLOCKS = Blocks(entries=800, entry_bytes=1024, devices=2, layers=3)


def test_arrangements_store_the_same_entries_in_different_orders(tmp_path: Path) -> None:
    directories = device_directories(tmp_path, 3)
    for each in directories:
        each.mkdir()
    recorded = recorded_context()
    found = {
        name: arranged(recorded, name, options, directories)
        for name, options in ARRANGEMENTS.items()
    }
    folders = own_folders(directories)
    stored = {name: Stored.open(one.id, folders, GEOMETRY) for name, one in found.items()}
    for name, one in found.items():
        assert name in one.id
        assert one.blocks == stored[name].about.blocks
        entries = recorded.kv[1][4 : 4 + one.blocks.entries]
        layer = stored[name].layers[1]
        place, offset = one.blocks.place(1, np.arange(one.blocks.blocks))
        for number, entries_of in enumerate(layer.order.reshape(-1, one.blocks.block)):
            raw = stored[name].files[place[number]].read_bytes()[offset[number] :]
            assert raw[: entries[entries_of].size] == entries[entries_of].tobytes()
    assert [found[name].blocks.block for name in (PAGES, ENTRY, OURS)] == [16, 1, 8]
    assert (stored[PAGES].layers[0].order == np.arange(found[PAGES].blocks.entries)).all()
    entries = found[POSITION].blocks.entries
    for text, ours in zip(stored[POSITION].layers, stored[OURS].layers, strict=True):
        assert (text.order == np.arange(entries)).all()
        assert sorted(ours.order) == [*range(entries)]
        assert (ours.order != np.arange(entries)).any()


def test_blocks_are_counted_for_each_token() -> None:
    measured = Measured()
    measured.add(Counts(100, 20), Counts(220, 60), 30)
    measured.add(Counts(220, 60), Counts(220, 60), 30)
    assert measured.read == [4, 0]
    assert measured.in_memory == [0.25, 0]


def test_speeds_are_compared_within_rounds() -> None:
    report = Report("clusters", {})
    # The machine is half as fast in the second and the third round.
    found = {
        (0.1, POSITION, 4): Measured([0.3, 0.6, 0.6], [0.2, 0.4, 0.4], [10, 12, 11], [0.5] * 3),
        (0.1, OURS, 4): Measured([0.6, 1.2, 1.2], [0.1, 0.2, 0.2], [5, 7, 6], [0.8] * 3),
    }
    add_speeds(report, found, {POSITION: BLOCKS, OURS: BLOCKS})
    figures = report.figures
    assert figures["tokens_per_second_position_10_b4"] == pytest.approx(10)
    assert figures["tokens_per_second_ours_10_b4"] == pytest.approx(20)
    assert figures["ttft_ms_ours_10_b4"] == pytest.approx(1200)
    assert figures["read_bytes_position_10_b4"] == 11 * 4096
    assert figures["tokens_per_second_ours_to_position_10_b4"] == pytest.approx(2)
    assert figures["ttft_ours_to_position_10_b4"] == pytest.approx(2)
    ours = report.runs[-1]
    assert (ours["system"], ours["batch"], ours["block"]) == (OURS, 4, 4)
    assert ours["selected"] == pytest.approx(0.1)
    assert ours["ttft_ms_p50"] == pytest.approx(1200)


def test_answers_are_reported_by_share_and_arrangement() -> None:
    report = Report("clusters", {})
    add_answers(
        report, {(0.05, POSITION): [(0.4, False), (0.2, True)], (0.05, OURS): [(0.1, True)] * 2}
    )
    assert report.figures == pytest.approx(
        {"kl_position_5": 0.3, "top1_position_5": 0.5, "kl_ours_5": 0.1, "top1_ours_5": 1.0}
    )
    assert [(run["system"], run["sparsity"]) for run in report.runs] == [
        (POSITION, 0.05), (OURS, 0.05),
    ]  # fmt: skip
