"""Tests that each power refuses the options of SGLang that it does not serve."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sgl_ext.engine.core.hooks import ActivationError
from sgl_ext.engine.core.power import Power
from sgl_ext.engine.core.powers import ORDER
from sgl_ext.engine.core.unserved import COMMON, require_served
from sgl_ext.engine.tiers.power import TiersPower

NONE = {"pp_size": 1, "attn_cp_size": 1, "tp_size": 1, "dp_size": 1, "disaggregation_mode": "null"}


@pytest.mark.parametrize("power", ORDER, ids=lambda power: power.name)
def test_each_unserved_option_is_refused_by_name(power: type[Power[Any]]) -> None:
    from sglang.srt.server_args import ServerArgs

    unserved = (*COMMON, *power.unserved)
    fields = [field for field, *_ in unserved]
    assert set(fields) <= set(ServerArgs.__struct_fields__)
    off = dict.fromkeys(fields, False) | NONE
    require_served(SimpleNamespace(**off), power.name, unserved)
    if power is TiersPower:
        require_served(SimpleNamespace(**off | {"pp_size": 2}), "tiers", unserved)
    for field in fields:
        flag, message = field.replace("_", "-"), f"{power.name} does not support"
        with pytest.raises(ActivationError, match=rf"{message} .* \(--{flag}\)"):
            require_served(SimpleNamespace(**off | {field: 2}), power.name, unserved)


def test_tiers_of_pipeline_stages_need_one_process_for_each_stage() -> None:
    message = r"tiers does not support tensor parallelism with pipeline parallelism \(--tp-size\)"
    with pytest.raises(ActivationError, match=message):
        require_served(
            SimpleNamespace(**NONE | {"tp_size": 2, "pp_size": 2}),
            "tiers",
            TiersPower.unserved_with_pipeline,
        )
