"""Packed weights: their products equal torch's, and weight updates drop them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from forked import template

PROGRAM = """
import json, sys
import torch
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.scheduler import Scheduler

def probe(self, path):
    from sgl_ext.engine.cpu import packed_linear
    json.dump(len(packed_linear._packed), open(path, "w"))

# Schedulers import this file before their arguments arrive.
Scheduler.probe = probe

def main():
    model, state = sys.argv[1:]
    engine = Engine(model_path=model, dtype="float32", max_total_tokens=2048, log_level="warning")
    sampling = {"temperature": 0, "max_new_tokens": 8}

    def packed():
        engine.collective_rpc("probe", path=state)
        return json.load(open(state))

    def answer():
        return engine.generate("The capital of France is", sampling)["output_ids"]

    found = {"before": answer(), "packed": packed()}
    # Every token has the same embedding, and so the same logits.
    from transformers import AutoModelForCausalLM
    name = "model.embed_tokens.weight"
    weight = AutoModelForCausalLM.from_pretrained(model).state_dict()[name]
    for done, why in (
        engine.begin_weight_update(),
        engine.update_weights_from_tensor([(name, torch.zeros_like(weight))]),
        engine.end_weight_update(),
    ):
        assert done, why
    found |= {"after": answer(), "left": packed()}
    print(json.dumps(found), flush=True)
    engine.shutdown()

if __name__ == "__main__":
    main()
"""


def test_updated_weights_replace_packed_ones(model: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [str(program), str(model), str(tmp_path / "state")]
    done = template.run(command, os.environ, timeout=300, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = (json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{")
    assert found["packed"] == 6 * 4 + 1  # four products of each layer, and the head
    assert found["left"] == 0
    assert found["after"] != found["before"]
    assert len(set(found["after"])) == 1


@pytest.mark.parametrize("rows", [1, 3, 64, 500])
def test_packed_products_equal_those_of_torch(rows: int) -> None:
    import torch
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    from sgl_ext.engine.cpu import packed_linear

    layer = torch.nn.Linear(96, 160)
    packed_linear._pack(layer)
    assert layer in packed_linear._packed
    x = torch.randn(rows, 96)
    with torch.no_grad():
        torchs = UnquantizedLinearMethod.apply
        found = packed_linear._apply(torchs, UnquantizedLinearMethod(), layer, x, layer.bias)
        assert torch.allclose(found, layer(x), atol=1e-5)


def test_weights_beyond_the_limit_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from sgl_ext.engine.cpu import packed_linear

    monkeypatch.setattr(packed_linear, "_left", 4 * 10 * 20)
    one, other = torch.nn.Linear(10, 20), torch.nn.Linear(10, 20)
    packed_linear._pack(one)
    packed_linear._pack(other)
    assert one in packed_linear._packed
    assert other not in packed_linear._packed
