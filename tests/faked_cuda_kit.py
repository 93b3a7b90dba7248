"""Processes with a faked CUDA device: environment, arguments, a small model, and their journal."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import requests
from conftest import ROOT
from transfer_kit import fake_cuda

from sgl_ext.models import SMOLLM2, prepare
from sgl_ext.serving.server import Server, System

DEADLINE_S = 300.0
START_S = 540.0
"""Deadline for the start of servers; interpreted kernels compute their first prompts."""
TOKENS = 2048
SIZE = ("--max-total-tokens", str(TOKENS), "--dtype", "float32")
ARGUMENTS = (
    *SIZE, "--attention-backend", "triton", "--triton-attention-num-kv-splits", "1",
    "--sampling-backend", "pytorch", "--disable-cuda-graph",
)  # fmt: skip
"""Arguments of a server on the faked device; its kernels run in Triton's interpreter"""


def environment(folder: Path, journal: Path) -> dict[str, str]:
    """Returns what the environment of a process with the faked device has in addition.

    CUDA's runtime and driver are one library: two of them would be two devices.

    Args:
        folder: folder for the libraries.
        journal: folder for the journal.
    """
    libraries = folder / "libraries"
    libraries.mkdir(parents=True, exist_ok=True)
    for name in ("libcudart.so", "libcuda.so.1"):
        if not (link := libraries / name).exists():
            link.symlink_to(fake_cuda(folder))
    path = [str(ROOT / "tests" / "faked_cuda"), str(ROOT / "scripts" / "gpu")]
    return {
        "PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "LD_LIBRARY_PATH": str(libraries),
        "SGLEXT_FAKED_CUDA": "1",
        "SGLEXT_UNTRIED": "1",
        "SGLEXT_FAKED_CUDART": str(libraries / "libcudart.so"),
        "SGLEXT_FAKED_CUDA_JOURNAL": str(journal),
    }


def on_faked_cuda(name: str, folder: Path, *arguments: str) -> System:
    """Returns a server on the faked device, which writes its journal into ``folder/NAME``."""
    return System(name, (*ARGUMENTS, *arguments), environment(folder, folder / name))


def journal(server: Server) -> Iterator[dict[str, Any]]:
    """Yields the lines of a server's journal; see :func:`lines`."""
    return lines(Path(server.system.environment["SGLEXT_FAKED_CUDA_JOURNAL"]))


def lines(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of the journals in a folder; see ``faked_cuda.journal``."""
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            yield json.loads(line)


def small_llama(folder: Path, *, layers: int = 2, longest: int = 4096) -> Path:
    """Writes a Llama of random weights whose heads fit Triton's kernels, and returns its folder.

    It has 4 query heads and 2 KV heads of dimension 64, and SmolLM2's tokenizer. With the default
    ``initializer_range`` of 0.02 it would repeat the last token of any prompt, whatever its KV.
    """
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokens = AutoTokenizer.from_pretrained(prepare(SMOLLM2))
    config = LlamaConfig(
        vocab_size=len(tokens), hidden_size=256, intermediate_size=512, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=longest,
        tie_word_embeddings=True, initializer_range=0.1, bos_token_id=tokens.bos_token_id,
        eos_token_id=tokens.eos_token_id, pad_token_id=tokens.pad_token_id,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokens.save_pretrained(folder)
    return folder


def post(server: Server, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the answer to a request, which must succeed."""
    response = requests.post(f"{server.url}{route}", json=body, timeout=DEADLINE_S)
    assert response.ok, response.text
    answer: dict[str, Any] = response.json()
    return answer


def ask(
    server: Server,
    prompt: object,
    tokens: int = 4,
    custom_params: Mapping[str, object] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Returns a server's greedy answer to a text, a list of texts and contexts, or token ids."""
    return post(server, "/generate", _question(prompt, tokens, custom_params, more))


def streamed(server: Server, prompt: object, tokens: int, **more: Any) -> Iterator[dict[str, Any]]:
    """Yields what a server has answered so far, token by token; arguments as those of `ask`."""
    body = {**_question(prompt, tokens, None, more), "stream": True}
    with requests.post(
        f"{server.url}/generate", json=body, stream=True, timeout=DEADLINE_S
    ) as response:
        assert response.ok, response.text
        for line in response.iter_lines():
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))


def _question(
    prompt: object, tokens: int, custom_params: Mapping[str, object] | None, more: dict[str, Any]
) -> dict[str, Any]:
    ids = isinstance(prompt, list) and isinstance(prompt[0], int)
    parameters = {
        "temperature": 0, "max_new_tokens": tokens, "ignore_eos": True,
        "custom_params": custom_params or {},
    }  # fmt: skip
    body = {"sampling_params": parameters, "return_logprob": True, **more}
    return {"input_ids" if ids else "text": prompt, **body}


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Asserts that two answers have the same tokens, of which the logprobs differ by rounding."""
    assert found["output_ids"] == expected["output_ids"]
    logprobs = [
        [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        for answer in (found, expected)
    ]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)


def entry(answer: dict[str, Any], power: str) -> dict[str, Any]:
    """Returns what a power has told of an answer."""
    (found,) = [each for each in answer["meta_info"].get("ext") or () if each["power"] == power]
    return dict(found)


def waits(server: Server, since: float, where: str) -> set[str]:
    """Returns the functions in a part of the plugin in which the faked device was waited for.

    Args:
        since: time on the monotonic clock from which waits count.
        where: part of the path of their modules.
    """
    found = set()
    for line in journal(server):
        if line["at"] >= since and line["kind"] in ("sync", "read", "upload"):
            inside = (place for place in line["places"] if where in place)
            found |= {place.split(":")[1].split()[1] for place in islice(inside, 1)}
    return found


def faults(server: Server) -> list[str]:
    """Returns the races and the misuses that the faked device has found."""
    return [line["what"] for line in journal(server) if line["kind"] in ("race", "refused")]
