"""Tests of the configuration: accepted values, resolved values and error messages."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from sgl_ext.config import EXAMPLES, SECTIONS, ExtConfig, load
from sgl_ext.config.source import ConfigError
from sgl_ext.config.values import EmulatedDevice


def error_of(source: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(source)  # type: ignore[arg-type]
    return str(caught.value)


def test_everything_is_off_by_default() -> None:
    assert load(None) == load("{}") == load({}) == ExtConfig()
    assert ExtConfig().sections() == {}
    assert set(SECTIONS) < set(ExtConfig.model_fields)


@pytest.mark.parametrize(("name", "example"), EXAMPLES.items())
def test_errors_show_an_example_that_enables_the_section(name: str, example: str) -> None:
    outer, _, inner = name.partition(".")
    for wrong in (True, "on", []):
        message = error_of({outer: {inner: wrong} if inner else wrong})
        assert f"{name!r}: expected a section such as {example}" in message
    section = json.loads(example)
    load({"tiers": {"host": {"capacity": "4GiB"}}, outer: {inner: section} if inner else section})
    if section:
        assert (
            f"is required; write, for example, {name}: {example}"
            in error_of({outer: {inner: {}} if inner else {}})
            or name == "tiers"
        )


@pytest.mark.parametrize(
    ("written", "size"),
    [("4GiB", 4 << 30), ("4 GiB", 4 << 30), ("1.5MiB", 3 << 19), ("10GB", 10**10), (4096, 4096)],
)
def test_sizes_are_parsed(written: object, size: int) -> None:
    config = load({"swap": {"capacity": written}})
    assert config.swap is not None
    assert config.swap.capacity == size


@pytest.mark.parametrize(
    "written",
    ["4 gibs", "1,5GiB", "4,096MiB", "16GiB/2", "8GiB a rank", "400", "", -1, 0, True, 1.5, None,
     [1]],
)  # fmt: skip
def test_invalid_sizes_are_refused(written: object) -> None:
    message = error_of({"swap": {"capacity": written}})
    assert "'swap.capacity'" in message
    assert repr(written) in message


@pytest.mark.parametrize(
    ("written", "seconds"), [("250ms", 0.25), ("10 min", 600), ("1.5h", 5400), (3, 3), (0.5, 0.5)]
)
def test_times_are_parsed(written: object, seconds: float) -> None:
    assert load({"start_deadline": written}).start_deadline == pytest.approx(seconds)


@pytest.mark.parametrize(
    "written", ["250", "250 parsecs", "ms", -1, 0, True, float("inf"), 1e10, None]
)
def test_invalid_times_are_refused(written: object) -> None:
    assert "'start_deadline'" in error_of({"start_deadline": written})


@given(st.integers(1, 1 << 50), st.floats(1e-6, 1e6))
def test_a_resolved_configuration_can_be_loaded_again(size: int, seconds: float) -> None:
    config = load({"swap": {"capacity": size}, "start_deadline": seconds})
    again = load(json.dumps(config.resolved()))
    assert again.swap == config.swap
    assert again.start_deadline == pytest.approx(config.start_deadline)


def test_yaml_and_json_files_are_loaded(tmp_path: Path) -> None:
    content = {"tiers": {"ssd": {"directories": [str(tmp_path)], "capacity": "1GiB"}}}
    for name, text in (("c.yaml", yaml.safe_dump(content)), ("c.json", json.dumps(content))):
        (tmp_path / name).write_text(text)
        assert load(tmp_path / name) == load(content)
    (tmp_path / "empty.yaml").write_text("# nothing is on\n")
    assert load(tmp_path / "empty.yaml") == ExtConfig()


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    assert "No such file or directory; give the path" in error_of(tmp_path / "missing.yaml")
    assert "not a regular file" in error_of(tmp_path)
    assert "not a regular file" in error_of("/dev/zero")
    os.mkfifo(tmp_path / "fifo")
    assert "not a regular file" in error_of(tmp_path / "fifo")
    (tmp_path / "large.yaml").write_text("#" * (2 << 20))
    assert "more than 1048576 bytes" in error_of(tmp_path / "large.yaml")
    assert "found ''" in error_of("")
    assert "found 5" in error_of(5)
    assert "null" in error_of("a\0b")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in error_of(tmp_path / "binary.yaml")
    (tmp_path / "broken.yaml").write_text("tiers: [")
    assert "neither YAML nor JSON" in error_of(tmp_path / "broken.yaml")
    (tmp_path / "twice.yaml").write_text("swap: null\nswap: null\n")
    assert "'swap' is given twice" in error_of(tmp_path / "twice.yaml")


def test_an_unknown_home_directory_is_refused() -> None:
    assert "cannot read the configuration file ~nobody-here/c" in error_of("~nobody-here/c.yaml")


def test_yaml_anchors_and_merge_keys_are_resolved(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("tiers:\n  host: &size {capacity: 1GiB}\nswap:\n  <<: *size\n")
    config = load(tmp_path / "c.yaml")
    assert config.swap is not None
    assert config.swap.capacity == 1 << 30


def test_unknown_keys_get_a_suggestion() -> None:
    assert "unknown key 'teirs' (did you mean 'tiers'?)" in error_of({"teirs": {}})
    message = error_of({"tiers": {"host": {"capacity": 1, "colour": "red"}}})
    assert "unknown key 'tiers.host.colour' (known keys: capacity, emulate, link)" in message


def test_all_problems_are_reported_together() -> None:
    message = error_of({"teirs": {}, "peer": {"role": "boss"}, "swap": {}})
    assert "'teirs'" in message
    assert "'peer.role': Input should be 'master' or 'worker', found 'boss'" in message
    assert "'swap.capacity' is required" in message


@pytest.mark.parametrize("source", ["{", '{"a": 1, "a": 2}', "[1]", '{"tiers": [1]}'])
def test_sources_that_are_no_mapping_of_sections_are_refused(source: str) -> None:
    assert error_of(source)


@pytest.mark.parametrize(
    "content",
    ["start_deadline: 2020-13-45", "a: !!int abc", "a: !!timestamp abc", "? [a]\n: 1",
     "a: " + "9" * 5000, "[" * 100_000, "a: [\nb: ]\n- c", "a: &x {b: *x}"],
)  # fmt: skip
def test_errors_about_malformed_files_have_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(content)
    message = error_of(path)
    assert len(message.splitlines()) == 1
    assert len(message) < 1000


def test_a_null_section_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("chunks:\n")
    wanted = "'chunks': the section is empty, found None; write, for example, chunks: {}, or remove"
    for source in (tmp_path / "c.yaml", '{"chunks": null}'):
        assert wanted in error_of(source)
    assert load({"chunks": {}}).sections() == {"chunks": load({"chunks": {}}).chunks}


@pytest.mark.parametrize("name", SECTIONS)
def test_the_example_for_an_empty_section_is_valid(name: str) -> None:
    message = error_of({"tiers": {"host": {"capacity": "4GiB"}}, name: None})
    example, _, _ = message.partition(f"write, for example, {name}: ")[2].partition(", or remove")
    section = {name: json.loads(example)}
    assert load({"tiers": {"host": {"capacity": "4GiB"}}} | section).sections()[name]


def test_an_error_states_the_problem_the_value_and_the_remedy() -> None:
    clusters = {"directories": ["/a"], "copies": 2}
    problem = "'clusters': copies is 2, but the number of directories is 1"
    assert f"{problem}, found {clusters}; add directories, or lower copies" in error_of(
        {"clusters": clusters}
    )
    clusters = {"directories": ["/a"], "sparsity": 0.5}
    problem = "'clusters': sparsity 0.5 exceeds largest 0.25"
    assert f"{problem}, found {clusters}; raise largest, or lower sparsity" in error_of(
        {"clusters": clusters}
    )


def test_deep_inline_json_is_refused_and_a_byte_order_mark_is_ignored() -> None:
    assert "not JSON" in error_of('{"a":' * 100_000)
    assert load("\ufeff{}") == ExtConfig()


@pytest.mark.parametrize("master", ["", "host", ":50051", "host:port", "a b:1"])
def test_a_master_address_without_host_and_port_is_refused(master: str) -> None:
    assert "tiers.remote.master" in error_of({"tiers": {"remote": {"master": master}}})


@pytest.mark.parametrize("term", [{"keep": 1}, {"window": "1s"}, {"granularity": "unit"}])
def test_terms_of_lending_are_refused_for_a_master(term: dict[str, object]) -> None:
    master = {"role": "master", "directory": "/run/peers", "capacity": "1GiB"}
    message = error_of({"peer": {**master, **term}})
    assert "keep, window and granularity require role worker, found " in message
    assert message.endswith("; remove them")
    described = load({"peer": master}).resolved()  # has them with their defaults
    assert load(described).peer == load({"peer": master}).peer


@pytest.mark.parametrize("role", ["master", "worker"])
def test_a_lease_shorter_than_the_messages_take_is_refused(role: str) -> None:
    peer = {"role": role, "directory": "/run/peers", "capacity": "1GiB"}
    assert "peer.lease" in error_of({"peer": {**peer, "lease": "200ms"}})
    assert load({"peer": {**peer, "lease": "1s"}}).peer is not None


@pytest.mark.parametrize("tier", ["host", "ssd", "remote"])
def test_a_tier_without_values_is_refused(tier: str) -> None:
    other = {"ssd": {"directories": ["/x"], "capacity": "1GiB"}, "host": {"capacity": "1GiB"}}
    message = error_of({"tiers": other | {tier: None}, "swap": {"capacity": "1GiB"}})
    assert f"'tiers.{tier}'" in message and "the tier has no values" in message


def test_duplicate_or_empty_directories_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    directories = [str(tmp_path), str(tmp_path / "link")]
    message = error_of({"tiers": {"ssd": {"directories": directories, "capacity": "1GiB"}}})
    assert f"{tmp_path}: the same directory is given twice, found [" in message
    assert message.endswith("; list each directory once")
    assert "the same directory is given twice" in error_of(
        {"clusters": {"directories": directories}}
    )
    assert "a directory has an empty path" in error_of({"clusters": {"directories": [""]}})
    ssd = {"directories": [str(tmp_path)], "capacity": "1GiB"}
    message = error_of({"tiers": {"ssd": ssd}, "clusters": {"directories": [str(tmp_path)]}})
    assert f"tiers.ssd and clusters both use {tmp_path}; give each its own" in message


@pytest.mark.parametrize(
    ("restore", "message"),
    [
        ({"policy": "fifo"}, "'restore.policy': Input should be 'shortest', 'longest' or 'cake'"),
        ({"chunk": 0}, "'restore.chunk'"),
        ({"chunk": 0.5}, "'restore.chunk'"),
        ({"ageing": -1}, "'restore.ageing'"),
        ({"ageing": 0}, "'restore.ageing'"),
    ],
)
def test_invalid_restore_options_are_refused(restore: dict[str, object], message: str) -> None:
    tiers = {"ssd": {"directories": ["/ssd"], "capacity": "1GiB"}}
    with pytest.raises(ConfigError, match=re.escape(message)):
        load({"tiers": tiers, "restore": restore})


def test_incomplete_or_conflicting_sections_are_refused() -> None:
    assert "restore requires a tiers section to restore from" in error_of({"restore": {}})
    assert "no tier is given, found {}; add host, ssd or remote" in error_of({"tiers": {}})
    tiers = {"host": {"capacity": "1GiB"}, "layout": "layer_major"}
    assert "remove tiers.layout, or the chunks section" in error_of({"tiers": tiers, "chunks": {}})
    assert load({"tiers": tiers}).tiers is not None


@pytest.mark.parametrize("device", [{"bytes_per_second": -5}, {"bytes_per_second": 0}, {}])
def test_emulated_devices_need_a_positive_rate(device: dict[str, object]) -> None:
    ssd = {"directories": ["/ssd"], "capacity": "1GiB", "emulate": device}
    with pytest.raises(ConfigError, match=r"tiers[.]ssd[.]emulate[.]bytes_per_second"):
        load({"tiers": {"ssd": ssd}})


def sections_in(annotation: object) -> list[type[BaseModel]]:
    options = [annotation, *getattr(annotation, "__args__", ())]
    return [each for each in options if isinstance(each, type) and issubclass(each, BaseModel)]


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yields the dotted keys of a section, including the keys of nested sections."""
    for name, field in model.model_fields.items():
        nested = sections_in(field.annotation)
        if nested and nested[0] is not EmulatedDevice:
            yield from keys_of(nested[0], f"{prefix}{name}.")
        else:
            yield prefix + name


@pytest.mark.parametrize("section", ["memory", *SECTIONS])
def test_the_reference_names_every_key(section: str) -> None:
    reference = (ROOT / "sgl_ext" / "config" / "README.md").read_text()
    _, _, part = reference.partition(f"\n## `{section}`")
    written = set(re.findall(r"`([\w.]+)(?:\.\*)?`[,|\s]", part.partition("\n## ")[0]))
    (kind,) = sections_in(ExtConfig.model_fields[section].annotation)
    assert set(keys_of(kind)) - written == set()
