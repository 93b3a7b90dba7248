"""The page of the Python API is the one that its script writes."""

from __future__ import annotations

import runpy
import subprocess
import sys

from conftest import ROOT


def test_the_page_of_the_api_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "list_api.py"))["page"]()
    assert (ROOT / "sgl_ext" / "API.md").read_text() == page


def test_clients_import_neither_torch_nor_sglang() -> None:
    program = "import sys, sgl_ext.client, sgl_ext.clusters.client; print({*sys.modules})"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert not found.returncode, found.stderr
    assert not {"torch", "sglang"} & {*eval(found.stdout)}  # noqa: S307
