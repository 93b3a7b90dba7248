"""``sgl.Engine`` in a separate program: its schedulers run the extension only if asked to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
# A spawned process imports this file, and the engine with it, before its arguments arrive.
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.server_args import ServerArgs

OPTIONS = dict(model_path={model!r}, max_total_tokens=4096)

def engine(**kwargs):
    engine = Engine(**kwargs)
    text = engine.generate("The capital of France is", {{"temperature": 0, "max_new_tokens": 2}})
    print(engine.get_server_info().get("sgl_ext", {{}}).get("version"), text["text"], flush=True)
    engine.shutdown()

if __name__ == "__main__":
    engine(server_args=ServerArgs(**OPTIONS, log_level="error"), enable_ext=True)
    engine(**OPTIONS)
"""


def test_extended_and_stock_engines_in_one_program(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(model=str(model)))
    result = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    extended, stock = result.stdout.splitlines()
    assert extended.startswith("0.1.0 ")
    assert stock == extended.replace("0.1.0", "None", 1)
