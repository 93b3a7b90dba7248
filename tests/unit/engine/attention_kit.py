"""Kit for tests of the CPU attention."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from sgl_ext.bench.harness.attention_trial import Geometry


def geometries(
    *, groups: int, head_dims: list[int], windows: st.SearchStrategy[int]
) -> st.SearchStrategy[Geometry]:
    """Returns a strategy for small geometries, with and without a window.

    A KV head has at most ``groups`` query heads.
    """
    return st.builds(
        lambda kv_heads, group, head_dim, window, dtype: Geometry(
            kv_heads * group, kv_heads, head_dim, window, dtype
        ),
        st.integers(1, 3),
        st.integers(1, groups),
        st.sampled_from(head_dims),
        st.none() | windows,
        st.sampled_from([torch.float32, torch.bfloat16]),
    )
