"""Options of SGLang that a power does not serve are refused before anything is loaded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sgl_ext.engine.chunks.power import _UNSERVED as OF_CHUNKS
from sgl_ext.engine.core.hooks import ActivationError
from sgl_ext.engine.core.unserved import COMMON, Unserved, require_served
from sgl_ext.engine.restore.power import _UNSERVED as OF_RESTORE
from sgl_ext.engine.tiers.power import _UNSERVED as OF_TIERS

NONE = {"pp_size": 1, "attn_cp_size": 1, "tp_size": 1}


@pytest.mark.parametrize(
    ("power", "own"), [("tiers", OF_TIERS), ("chunks", OF_CHUNKS), ("restore", OF_RESTORE)]
)
def test_each_is_refused_by_name(power: str, own: Unserved) -> None:
    from sglang.srt.server_args import ServerArgs

    fields = [field for field, *_ in (*COMMON, *own)]
    assert set(fields) <= set(ServerArgs.__struct_fields__)
    off = dict.fromkeys(fields, False) | NONE
    require_served(SimpleNamespace(**off), power, own)
    for field in fields:
        flag = field.replace("_", "-")
        with pytest.raises(ActivationError, match=rf"{power} do not work with .* \(--{flag}\)"):
            require_served(SimpleNamespace(**off | {field: 2}), power, own)
