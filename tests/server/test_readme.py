"""Commands of README's section on the command line, pasted in their order."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from sgl_ext.serving.server import System, extension, serve

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
SECONDS = ("sgl-ext init", "sgl-ext describe", "sgl-ext doctor --config my.yaml ")
"""Beginnings of commands without a server that take seconds."""


def block(command: str) -> str:
    """Returns the block of commands that begins with a command, without comments."""
    (found,) = (each for each in BLOCKS if each.startswith(command))
    return re.sub(r"\s+#.*", "", found)


@pytest.fixture(scope="module")
def folder(model: Path, logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the files of a clone that commands name, and a server with ``my.yaml``."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copy(ROOT / "LICENSE", folder)
    (configure, _serve) = block("mkdir -p kv").splitlines()
    paste(configure, folder)
    config = yaml.safe_load((folder / "my.yaml").read_text())
    # Other servers run on the same machine.
    config["tiers"]["host"]["capacity"] = config["tiers"]["ssd"]["capacity"] = "512MiB"
    arguments = ("--max-total-tokens", "8192", "--page-size", "16", *extension(config))
    with serve([System("readme", arguments)], model, logs) as (server,):
        os.environ["SGLEXT_URL"] = server.url
        try:
            yield folder
        finally:
            del os.environ["SGLEXT_URL"]


def paste(command: str, folder: Path) -> str:
    """Runs a line in a shell whose ``PATH`` has the environment's commands first."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env={**os.environ, "PATH": path},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def test_commands_for_a_server_succeed(folder: Path) -> None:
    commands = block("sgl-ext verify").splitlines()
    printed = {command: paste(command, folder) for command in commands}
    assert "No wrong answer was found." in printed["sgl-ext verify"]
    assert "ctx-" in printed["sgl-ext contexts create LICENSE"]
    assert printed["sgl-ext stored store LICENSE"].startswith("stx-")
    assert "clusters" in printed["sgl-ext top --once"]


def test_commands_without_a_server_succeed(folder: Path) -> None:
    commands = [f"{each} " for each in block("sgl-ext init").splitlines()]
    quick = [each for each in commands if each.startswith(SECONDS) and "--model-path" not in each]
    assert len(quick) == len(SECONDS)
    for command in quick:
        assert paste(command, folder)
