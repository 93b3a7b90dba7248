"""Restore profiles: saved costs are found again, and unsuitable profiles are not used."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_ext.calibration import profile as calibration
from sgl_ext.calibration.profile import calibrate
from sgl_ext.config import ExtConfig, load
from sgl_ext.doctor_model import linking
from sgl_ext.errors import ExtError
from sgl_ext.planning.compute_cost import ComputeCost, DecodeCost, fit
from sgl_ext.planning.costs import Costs
from sgl_ext.planning.load_cost import LoadCost
from sgl_ext.planning.profile import Profile, Subject, devices, find, known, path_of, save
from sgl_ext.serving import server

SUBJECT = Subject("fingerprint", "bfloat16", 16, "a machine")
PROFILE = Profile(
    SUBJECT,
    ComputeCost(1e-3, 2e-4, 3e-9),
    {"ssd": LoadCost(0.0, 1e-4)},
    {"ssd": "a disk"},
    DecodeCost(0.03, 1e-3),
)


def seeded(tiers: dict[str, str]) -> Costs:
    costs = Costs()
    PROFILE.seed(costs, tiers)
    costs.check_integrity()
    return costs


def test_saved_profile_is_found(tmp_path: Path) -> None:
    save(PROFILE, tmp_path / "new")
    assert find(SUBJECT, tmp_path / "new") == PROFILE
    costs = seeded({"ssd": "a disk"})
    assert costs.measured == {"compute", "decode", "ssd"}
    assert (costs.compute, costs.decode) == (PROFILE.compute, PROFILE.decode)
    assert costs.loads == PROFILE.loads
    assert [*(tmp_path / "new").iterdir()] == [path_of(SUBJECT, tmp_path / "new")]


def test_a_failed_save_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_path: Path, _target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="No space left"):
        save(PROFILE, tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_first_load_replaces_the_default_of_an_unmeasured_tier(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for now in ({"ssd": "another disk"}, {"ssd": "a disk", "remote": "a store"}):
        caplog.clear()
        costs = seeded(now)
        assert costs.compute == PROFILE.compute
        unknown = [name for name in now if name not in costs.measured]
        assert str(unknown) in caplog.text
        for name in unknown:
            costs.loaded(name, 100, 7.0)
            assert costs.loads[name].seconds(100) == pytest.approx(7.0)
    tiers = load({"tiers": {"ssd": {"directories": ["/a"], "capacity": "1GiB"}}}).tiers
    other = load({"tiers": {"ssd": {"directories": ["/b"], "capacity": "1GiB"}}}).tiers
    assert tiers is not None
    assert other is not None
    assert devices(tiers) != devices(other)
    assert devices(tiers) == devices(tiers.model_copy(update={"staging": 1 << 30}))
    host = {"capacity": "1GiB"}
    plain, linked = (
        load({"tiers": {"host": {**host, **more}}}).tiers
        for more in ({}, {"link": {"bytes_per_second": "1GiB"}})
    )
    assert plain is not None
    assert linked is not None
    assert devices(plain) != devices(linked)
    by_layers = plain.model_copy(update={"layout": "layer_major"})
    assert devices(plain) != devices(by_layers)
    # Profiles that name no layout are those of token_major.
    assert devices(plain) == {"host": '{"emulate":null,"link":null}'}


def test_profile_of_another_subject_is_not_used(tmp_path: Path) -> None:
    save(PROFILE, tmp_path)
    assert find(Subject("other", "bfloat16", 16, "a machine"), tmp_path) is None
    assert find(Subject("fingerprint", "bfloat16", 16, "another"), tmp_path) is None


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"version": 99}, "version 99"),
        ({"subject": {"model": "x", "dtype": "y", "page": 1, "device": "z"}}, "expected version"),
        ({"compute": {"overhead": -1.0, "per_token": 1.0, "per_pair": 0.0}}, "not positive"),
        ({"loads": {"ssd": {"latency": 0.0, "per_token": 0.0}}}, "not positive"),
        ({"decode": {"overhead": 0.1, "per_request": -1.0}}, "not positive"),
        ({"loads": 7}, "is not a cost profile"),
        (None, "is not a cost profile"),
    ],
)
def test_unusable_profiles_are_logged(
    change: dict[str, object] | None,
    note: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = save(PROFILE, tmp_path)
    path.write_text("{" if change is None else json.dumps(json.loads(path.read_text()) | change))
    with caplog.at_level(logging.WARNING):
        assert find(SUBJECT, tmp_path) is None
    assert note in caplog.text
    assert "sgl-ext calibrate" in caplog.text


@settings(deadline=None)
@given(
    overhead=st.floats(0, 0.1),
    per_token=st.floats(1e-5, 1e-2),
    per_pair=st.floats(0, 1e-6),
    begins=st.lists(st.integers(0, 8192), min_size=4, max_size=20),
)
def test_fit_recovers_the_costs_of_forwards(
    overhead: float, per_token: float, per_pair: float, begins: list[int]
) -> None:
    truth = ComputeCost(overhead, per_token, per_pair)
    lengths = [64, 512, 1024, 2048]
    forwards = [(begin, begin + length) for begin in (0, *begins) for length in lengths]
    found = fit([(begin, end, truth.seconds(begin, end)) for begin, end in forwards])
    for begin, end in forwards:
        assert found.seconds(begin, end) == pytest.approx(truth.seconds(begin, end), rel=1e-3)


@pytest.mark.parametrize(
    "samples", [[], [(0, 64, 0.1)] * 5, [(0, 64, 0.1), (0, 128, 0.2), (0, 256, 0.0)]]
)
def test_fit_refuses_insufficient_forwards(samples: list[tuple[int, int, float]]) -> None:
    with pytest.raises(ValueError, match="do not determine the costs"):
        fit(samples)


def test_known_yields_valid_profiles_of_this_version(tmp_path: Path) -> None:
    save(PROFILE, tmp_path)
    (tmp_path / "broken.json").write_text("{")
    assert [*known(tmp_path)] == [PROFILE]
    path_of(SUBJECT, tmp_path).write_text(json.dumps({"version": 1}))
    assert [*known(tmp_path)] == []


def test_calibration_without_a_tiers_section_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExtError, match="the configuration has no tiers section"):
        calibrate(tmp_path, ExtConfig(), [])


def test_each_tier_is_measured_with_the_settings_of_the_server(tmp_path: Path) -> None:
    whole = load(
        {
            "start_deadline": "2h",
            "tiers": {
                "host": {"capacity": "1GiB"}, "remote": {"master": "localhost:1"},
                "ssd": {"directories": [str(tmp_path)], "capacity": "1GiB"},
                "layout": "layer_major", "staging": "64MiB", "wait": "1s",
            },
        }
    )  # fmt: skip
    assert whole.tiers is not None
    for name, alone in calibration._one_by_one(whole.tiers):
        with alone as section:
            only = whole.model_copy(update={"tiers": section})
            found = load(calibration._system(name, only, ()).arguments[-1])
        assert found.start_deadline == 7200
        assert found.tiers is not None
        assert set(devices(found.tiers)) == {name}
        assert (found.tiers.layout, found.tiers.staging, found.tiers.wait) == (
            "layer_major", 64 << 20, 1.0,
        )  # fmt: skip


def test_the_server_of_doctor_has_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[server.System] = []

    def serve(systems: list[server.System], *_: object, **__: object) -> None:
        started.extend(systems)
        raise ExtError("enough")

    monkeypatch.setattr(server, "serve", serve)
    linking(tmp_path, load({"start_deadline": "2h", "chunks": {}}))
    (system,) = started
    assert load(system.arguments[-1]).start_deadline == 7200


@pytest.mark.parametrize(
    "data", [b"[" * 5000, b'{"subject":' * 5000, b"\xff\xfe", b"9" * 5000, b" " * (2 << 20)]
)
def test_malformed_profiles_are_logged_and_skipped(
    data: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path_of(SUBJECT, tmp_path).write_bytes(data)
    assert find(SUBJECT, tmp_path) is None
    assert "is not a cost profile" in caplog.text
    assert [*known(tmp_path)] == []
