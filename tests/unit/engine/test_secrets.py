"""Masking of keys in the arguments that SGLang prints and reports.

``test_serve_script`` covers HTTP.
"""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from sgl_ext.engine.workarounds.secrets import mask_command


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("serve --api-key s.cret --port 1", "serve --api-key <redacted> --port 1"),
        ("serve --api-key=s.cret", "serve --api-key=<redacted>"),
        ("Engine(api_key='s.cret', tp_size=1)", "Engine(api_key='<redacted>', tp_size=1)"),
        ("serve --model-path s.cret-model/xs.cret", "serve --model-path s.cret-model/xs.cret"),
    ],
)
def test_keys_are_masked_in_the_launch_command(command: str, expected: str) -> None:
    record = SimpleNamespace(
        api_key="s.cret", admin_api_key=None, ssl_keyfile_password=None, _launch_command=command
    )
    mask_command(record)
    assert record._launch_command == expected


def test_keys_are_masked_in_logged_and_reported_arguments() -> None:
    """Checks ``resolved_dict``, the source of both; the record keeps the keys to check requests."""
    program = """
import json, sys
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args
load_plugins()
for flags in (["--enable-ext"], []):
    keys = ["--api-key", "first-secret", "--admin-api-key", "other-secret"]
    record = prepare_server_args(["--model-path", "dummy", *keys, *flags])
    record.resolve_once()
    shown = record.resolved_dict()
    shown["launch_command"] = record.launch_command
    print(json.dumps([str(shown), record.api_key, record.admin_api_key]))
    sys.modules["sgl_ext.engine.launch.server_args"]._requested = None
"""
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    extended, stock = map(json.loads, output.splitlines()[-2:])
    assert extended[1:] == stock[1:] == ["first-secret", "other-secret"]
    assert "secret" not in extended[0]
    assert "'api_key': '<redacted>'" in extended[0]
    assert "--admin-api-key <redacted>" in extended[0]
    assert stock[0].count("first-secret") == 2  # SGLang itself, without the flag
