"""``sgl.Engine`` in a separate program: its schedulers run the extension only if asked to."""

from __future__ import annotations

from pathlib import Path

from engine_kit import run_program

PROGRAM = """
import json, sys

# The second engine spawns its processes, which import this file before their arguments arrive.
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.server_args import ServerArgs

def answer(**kwargs):
    engine = Engine(**kwargs)
    text = engine.generate("The capital of France is", {"temperature": 0, "max_new_tokens": 2})
    version = engine.get_server_info().get("sgl_ext", {}).get("version")
    print(json.dumps({"version": version, "text": text["text"]}), flush=True)
    engine.shutdown()

if __name__ == "__main__":
    options = dict(model_path=json.load(open(sys.argv[1])), max_total_tokens=4096)
    answer(server_args=ServerArgs(**options, log_level="error"), enable_ext=True)
    answer(**options)
"""


def test_extended_and_stock_engines_in_one_program(model: Path, tmp_path: Path) -> None:
    (extended, stock), _ = run_program(tmp_path, PROGRAM, str(model))
    assert extended["version"] == "0.1.0"
    assert stock == {"version": None, "text": extended["text"]}
