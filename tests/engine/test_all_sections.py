"""One engine for each maximal set of sections that the configuration accepts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from engine_kit import CHECKED, run_program

from sgl_ext.bench.exactness.sections import find
from sgl_ext.bench.exactness.servers import setup
from sgl_ext.config import load
from sgl_ext.config.sets import Sections, maximal, written
from sgl_ext.models import SMOLLM2, shortened

PROGRAM = """
import json, sys
from sglang.srt.entrypoints.engine import Engine

def main():
    model, config, pool = json.load(open(sys.argv[1]))
    more = {} if config is None else {"enable_ext": True, "ext_config": config}
    engine = Engine(model_path=model, page_size=16, max_total_tokens=pool, dtype="float32",
                    chunked_prefill_size=512, enable_priority_scheduling=True,
                    log_level="warning", **more)
    how = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    answers = []
    for ids in ([*range(1000, 1600)], [*range(1000, 1700)]):
        answer = engine.generate(input_ids=ids, sampling_params=how)
        answers.append([answer["output_ids"], answer["meta_info"]["cached_tokens"]])
    state = engine.get_server_info()["internal_states"][0].get("sgl_ext", {})
    print(json.dumps({"answers": answers, "powers": sorted(state)}))
    engine.shutdown()

if __name__ == "__main__":
    main()
"""


def answers(folder: Path, config: Mapping[str, Any] | None) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    model = str(shortened(SMOLLM2, 2))
    # Buffers for both layers take as much of the pool as may be borrowed, and what aligns it.
    layers = (config or {}).get("peer", {}).get("stream") == "layers"
    pool = 2048 + (4112 if layers else 0)
    (found,), _ = run_program(folder, PROGRAM, [model, config, pool], environment=CHECKED)
    return dict(found)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return answers(tmp_path_factory.mktemp("stock"), None)


@pytest.mark.parametrize("sections", maximal(), ids=written)
def test_an_engine_with_a_maximal_set_answers_as_stock_sglang(
    sections: Sections, stock: dict[str, Any], tmp_path: Path
) -> None:
    sockets = tmp_path / "p"
    sockets.mkdir(mode=0o700)
    config = setup(find(written(sections))[1], tmp_path / "stored", sockets).config
    found = answers(tmp_path / "engine", config)
    assert found["answers"] == stock["answers"]
    (_, first), (_, second) = found["answers"]
    assert first == 0
    assert second >= 576  # whole pages of the first prompt
    described = {"swap", "peer", "clusters", "restore", "tiers"} & load(config).sections().keys()
    assert described <= {*found["powers"]}
