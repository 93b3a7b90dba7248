"""Models that servers of the check serve: two made on the spot, and SmolLM2 if it is there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from gpu.check.environment import CARRIED
from gpu.check.setup import Setup

VOCABULARY = 512
"""Tokens of the models made here; the first 256 are bytes."""
DUMMY = ("--load-format", "dummy")
"""Arguments of servers of :func:`large`, which has no weights."""
PAGE = 16


def small(setup: Setup) -> Path:
    """Returns a Llama of two layers with random weights, made in a second.

    It has 4 query heads and 2 KV heads of dimension 64, so that a token has 1 KiB of float32 KV in
    each layer.
    """
    folder = setup.out / "small"
    if not (folder / "config.json").exists():
        import torch
        from transformers import LlamaForCausalLM

        config = _config(256, 512, 2, 4, 2, 64, initializer_range=0.08)
        scratch = setup.folder(f"small-{os.getpid()}")
        with torch.random.fork_rng():
            torch.manual_seed(0)
            LlamaForCausalLM(config).save_pretrained(scratch)
        _save_tokenizer(scratch)
        _place(scratch, folder)
    return folder


def large(setup: Setup, layers: int) -> Path:
    """Returns a folder without weights for a model of Llama-3-8B's shape, which measures speed.

    Each layer has 0.44 GB of bfloat16 weights, and 4 KiB of KV for a token.
    """
    folder = setup.out / f"large-{layers}{'-dry' if setup.dry else ''}"
    if not (folder / "config.json").exists():
        shape = (256, 512, 2, 4, 2, 64) if setup.dry else (4096, 14336, layers, 32, 8, 128)
        scratch = setup.folder(f"{folder.name}-{os.getpid()}")
        config = _config(*shape, rope_theta=500000.0, dtype="bfloat16")
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(scratch)
        _save_tokenizer(scratch)
        _place(scratch, folder)
    return folder


def smollm2() -> Path | None:
    """Returns SmolLM2-135M's folder, converted from what was carried; None if it is not there.

    ``SGLEXT_CACHE`` may hold it already converted.
    """
    from sgl_ext import models, packages

    file = models.SMOLLM2.gguf[0]
    target = packages.cache_dir() / "packages" / file.sha256[:16] / Path(file.member).name
    converted = packages.cache_dir() / "models" / models.SMOLLM2.name
    if not target.exists() and not converted.exists():
        parts = sorted(CARRIED.glob("smollm2-*/part"))
        if sum(part.stat().st_size for part in parts) != file.size:
            return None
        target.parent.mkdir(parents=True, exist_ok=True)
        joined = target.with_suffix(".joined")
        with joined.open("wb") as whole:
            for part in parts:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, whole)
        joined.rename(target)
    return models.prepare(models.SMOLLM2)


def _config(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, dim: int, **more: Any
) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=intermediate,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=dim, max_position_embeddings=32768, tie_word_embeddings=True,
        bos_token_id=256, eos_token_id=257, pad_token_id=258, **more,
    )  # fmt: skip


def _save_tokenizer(folder: Path) -> None:
    """Saves a tokenizer whose tokens are the bytes of a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer.add_special_tokens([*special.values()])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def _place(scratch: Path, folder: Path) -> None:
    """Moves a finished folder to its place, unless another process has made it meanwhile."""
    try:
        scratch.rename(folder)
    except OSError:
        shutil.rmtree(scratch, ignore_errors=True)
