"""HiCache and tensor parallelism on a CPU give the same tokens as transformers.

The reference is transformers because its implementation is independent of SGLang.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from sgl_ext.bench.data.texts import sharegpt_prompts
from sgl_ext.serving.server import Server, System, serve

NEW_TOKENS = 6


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return sharegpt_prompts(4, characters=(1500, 3000))


@pytest.fixture(scope="module")
def reference(model: Path, prompts: list[str]) -> list[list[int]]:
    """Returns the greedy tokens that transformers generates in fp32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt")
        output = network.generate(
            **inputs, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
        )
        answers.append(output[0, inputs["input_ids"].shape[1] :].tolist())
    return answers


def generate(server: Server, prompt: str) -> dict[str, Any]:
    parameters = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    body = {"text": prompt, "sampling_params": parameters}
    response = requests.post(f"{server.url}/generate", json=body, timeout=300)
    response.raise_for_status()
    return dict(response.json())


@pytest.mark.parametrize("page", [1, 16])
def test_hicache_with_a_file_backend_matches_transformers(
    model: Path, prompts: list[str], reference: list[list[int]], tmp_path: Path, page: int
) -> None:
    """The device pool holds two prompts, so the second round hits the host and file tiers."""
    store = tmp_path / "store"
    store.mkdir()
    arguments = [
        "--enable-ext", "--dtype", "float32", "--page-size", str(page),
        "--max-total-tokens", "1280", "--enable-cache-report", "--enable-hierarchical-cache",
        "--hicache-ratio", "4", "--hicache-storage-backend", "file",
        "--hicache-storage-prefetch-policy", "wait_complete",
    ]  # fmt: skip
    environment = {
        "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(store),
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    }
    hits = {"host": 0, "storage": 0}
    # A start with two rounds hits the host tier; a second start also hits the files of the first.
    for rounds in (2,) if page == 1 else (1, 2):
        with serve([System("hicache", arguments, environment)], model, tmp_path) as (server,):
            for _round in range(rounds):
                answers = [generate(server, prompt) for prompt in prompts]
                assert [answer["output_ids"] for answer in answers] == reference
                for answer in answers:
                    details = answer["meta_info"]["cached_tokens_details"] or {}
                    for tier in hits:
                        hits[tier] += details.get(tier, 0)
    assert hits["host"] > 600
    if page == 16:
        assert hits["storage"] > 600


def test_tensor_parallel_tiers_match_transformers(
    model: Path, prompts: list[str], reference: list[list[int]], tmp_path: Path
) -> None:
    """The ranks must agree on the pages that their tiers have loaded.

    SmolLM2 has 9 heads and 3 KV heads, therefore three ranks. They share two cores in CI. The
    device pool holds one of the prompts.
    """
    (tmp_path / "ssd").mkdir()
    ssd = {"directories": [str(tmp_path / "ssd")], "capacity": "256MiB", "keep_after": 1}
    config = json.dumps({"tiers": {"ssd": ssd, "staging": "64MiB"}})
    arguments = ["--max-total-tokens", "640", "--page-size", "16", "--dtype", "float32"]
    arguments += ["--tp", "3", "--enable-ext", "--ext-config", config]
    with serve([System("tp", arguments)], model, tmp_path) as (server,):
        for number in (0, 1, 0, 1):
            answer = generate(server, prompts[number])
            assert answer["output_ids"] == reference[number]
        details = answer["meta_info"]["cached_tokens_details"]
        assert details["host"] + details.get("ssd", 0) > 200
    assert len(list((tmp_path / "ssd").iterdir())) == 3  # each rank stores the KV of its own heads
