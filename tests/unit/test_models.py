"""Models that are made of others."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sgl_ext.errors import ExtError
from sgl_ext.models import SMOLLM2, prepare, with_kv_heads


@torch.no_grad()
def test_more_kv_heads_give_the_same_logits() -> None:
    more = with_kv_heads(SMOLLM2, 9)
    config = AutoConfig.from_pretrained(more)
    assert (config.num_key_value_heads, config.num_attention_heads) == (9, 9)
    tokens = torch.arange(100, 116)[None]
    own, found = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
        for folder in (prepare(SMOLLM2), more)
    )
    torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-3)


def test_its_own_kv_heads_give_the_model_itself() -> None:
    assert with_kv_heads(SMOLLM2, 3) == prepare(SMOLLM2)


@pytest.mark.parametrize("heads", [4, 63])
def test_unfit_numbers_of_kv_heads_are_refused(heads: int) -> None:
    with pytest.raises(ExtError, match=f"cannot have {heads} KV heads: give 3, or a multiple of 9"):
        with_kv_heads(SMOLLM2, heads)
