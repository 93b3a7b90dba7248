"""Facts about SGLang's devices and attention backends, and what follows from them.

The facts were read in SGLang's sources. A test fails if a new version of SGLang may change one.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
import runpy
import textwrap
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT
from sglang.srt.arg_groups import attention_hook, kv_cache_hook, model_override_base, overrides
from sglang.srt.environ import envs
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.model_executor.cuda_graph_config import Backend as Graphs
from sglang.srt.model_executor.cuda_graph_config import default_cuda_graph_config
from sglang.srt.runtime_context import override_platform

from sgl_ext.config import SECTIONS
from sgl_ext.engine.core import served
from sgl_ext.engine.core.powers import ORDER
from sgl_ext.engine.core.served import BACKENDS, PAGED, READY, Backend, Property

EVERY = [(device, backend) for device, all_ in BACKENDS.items() for backend in all_]
STORE = {"set_kv_buffer", "_set_kv_buffer"}
ATTEND = {
    "torch_native": {"_run_sdpa_forward_extend"},
    "triton": {
        "_forward_extend_kernel", "_forward_extend_unified", "_forward_extend_dcp",
        "_forward_extend_dense_one_shot", "extend_attention_fwd",
    },
    "fa3": {"flash_attn_with_kvcache", "flash_attn_varlen_func"},
    "fa4": {"flash_attn_with_kvcache", "flash_attn_varlen_func"},
    "trtllm_mha": {
        "trtllm_fmha_v2_prefill", "trtllm_batch_context_with_kv_cache",
        "trtllm_batch_decode_with_kv_cache", "_run_fixed_q_len_decode",
    },
}  # fmt: skip
"""Calls in ``forward_extend`` that attend."""


def source_of(kind: str) -> ast.ClassDef:
    """Returns the syntax tree of a class, whose module may need a compiled kernel."""
    module, _, name = kind.rpartition(".")
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    return next(each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name)


def method(kind: str, name: str) -> ast.FunctionDef:
    functions = (each for each in source_of(kind).body if isinstance(each, ast.FunctionDef))
    return next(each for each in functions if each.name == name)


def calls(node: ast.AST | list[ast.stmt], names: set[str]) -> Iterator[int]:
    """Yields the lines of the calls of some functions or methods."""
    for each in node if isinstance(node, list) else [node]:
        for call in ast.walk(each):
            if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] in names:
                yield call.lineno


def kind_of(name: str) -> str:
    return next(backend.kind for backend in BACKENDS["cuda"] if backend.name == name)


@pytest.mark.parametrize(("device", "backend"), EVERY, ids=lambda each: getattr(each, "name", each))
def test_backends_are_registered_by_sglang_under_their_names(device: str, backend: Backend) -> None:
    assert backend.name in ATTENTION_BACKENDS
    if backend.kind == served.OWN_KIND:
        assert f"{pkgutil.resolve_name(backend.kind).__module__}" in backend.kind
    else:
        assert source_of(backend.kind).name in inspect.getsource(ATTENTION_BACKENDS[backend.name]) \
            or backend.name == "torch_native"  # fmt: skip
    assert not backend.has & set(backend.lacks)


@pytest.mark.parametrize("name", ATTEND)
def test_extend_stores_before_it_attends(name: str) -> None:
    extend = method(kind_of(name), "forward_extend")
    attends = list(calls(extend, ATTEND[name]))
    assert attends
    assert max(calls(extend, STORE)) < min(attends)


def test_triton_attends_without_a_store_only_if_k_and_v_differ_in_width() -> None:
    # The slab does not serve such models.
    guard = inspect.getsource(TritonAttnBackend._can_run_dense_fp8_chunked_mha)
    assert "and layer.qk_head_dim == 192" in guard
    assert "and layer.v_head_dim == 128" in guard
    extend = ast.unparse(method(kind_of("triton"), "forward_extend"))
    assert extend.index("self._can_run_dense_fp8_chunked_mha(") < extend.index(
        "return self._forward_dense_fp8_chunked_mha("
    )


def test_flash_attention_skips_the_pool_only_without_a_radix_cache() -> None:
    source = ast.unparse(method(kind_of("fa3"), "__init__"))
    skip = "self.fa_skip_kv_cache = get_model().is_embedding and get_schedule()."
    assert skip + "chunked_prefill_size == -1 and get_memory().disable_radix_cache" in source


def test_flashinfer_stores_first_only_if_its_prefill_is_paged() -> None:
    extend = method(kind_of("flashinfer"), "forward_extend")
    branch = next(
        node for node in ast.walk(extend) if isinstance(node, ast.If)
        and ast.unparse(node.test) == "not self.forward_metadata.use_ragged"
    )  # fmt: skip
    attend = {"forward", "forward_return_lse"}
    assert max(calls(branch.body, STORE)) < min(calls(branch.body, attend))
    assert max(calls(branch.orelse, attend)) < min(calls(branch.orelse, STORE))
    metadata = method(kind_of("flashinfer"), "init_forward_metadata")
    chosen = [
        node for node in ast.walk(metadata) if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "use_ragged"
    ]  # fmt: skip
    assert [ast.unparse(node.value) for node in chosen] == [
        "False",
        "not self.enable_deterministic and (not is_in_tc_piecewise_cuda_graph()) "
        "and (not self.use_paged)",
    ]
    assert "if self.is_multimodal or self.enable_mis:" in ast.unparse(metadata)
    made = ast.unparse(method(kind_of("flashinfer"), "__init__"))
    assert all(f"self.{attribute} = " in made for attribute in PAGED)
    assert f"self.use_paged = envs.{served.PAGED_VARIABLE}.get()" in made
    assert getattr(envs, served.PAGED_VARIABLE).get() is False


def test_sglang_itself_lists_the_backends_on_cuda_that_take_strides() -> None:
    # Its own pool of one entry per token has such strides as well.
    listed = inspect.getsource(kv_cache_hook.handle_page_major_kv_layout)
    for backend in BACKENDS["cuda"]:
        if backend.name != "torch_native":  # indexes tokens with torch
            assert f'"{backend.name}"' in listed


def test_paged_views_of_strided_buffers_copy_nothing() -> None:
    import torch
    from sglang.srt.mem_cache.layout.paged_view import paged_kv_view

    slab = torch.arange(4 * 2 * 3 * 2 * 8).view(8, 3, 2, 2, 4)  # tokens, layers, K or V, heads, dim
    for page in (1, 2, 4):
        view = paged_kv_view(slab[:, 1, 0], page, 2, 4)
        assert view.shape == (8 // page, page, 2, 4)
        assert view.data_ptr() == slab[:, 1, 0].data_ptr()
        assert torch.equal(view.flatten(0, 1), slab[:, 1, 0])
    for name in ("fa3", "trtllm_mha"):
        assert list(calls(source_of(kind_of(name)), {"paged_kv_view"}))


def test_decode_is_captured_in_graphs_except_for_backends_of_torch() -> None:
    assert default_cuda_graph_config().decode.backend == Graphs.FULL
    source = textwrap.dedent(
        inspect.getsource(attention_hook.handle_attention_backend_compatibility)
    )
    disabled = {
        node.test.comparators[0].value  # type: ignore[attr-defined]
        for node in ast.walk(ast.parse(source)) if isinstance(node, ast.If)
        and ast.unparse(node.test).startswith("attention_backend == ")
        and "Phase.DECODE, backend=Backend.DISABLED" in ast.unparse(node)
    }  # fmt: skip
    eager = {backend.name for _, backend in EVERY if Property.EAGER_DECODE in backend.has}
    assert eager == disabled == {"torch_native", "flex_attention"}


@pytest.mark.parametrize(
    ("platform", "backend", "page"),
    [
        ({"has_flashinfer": True}, "flashinfer", 1),  # sm_80, sm_89 and sm_120
        ({"has_flashinfer": False}, "triton", 1),
        ({"is_hopper_with_cuda_12_3": True}, "fa3", 1),
        ({"is_sm100": True}, "trtllm_mha", 64),
    ],
)
def test_default_backends_on_cuda_serve_powers_that_split_rows(
    platform: Mapping[str, bool], backend: str, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = SimpleNamespace(is_out_of_tree=lambda: False)
    monkeypatch.setattr(model_override_base, "current_platform", stock)
    fields = dict.fromkeys(
        ("speculative_algorithm", "speculative_eagle_topk", "speculative_draft_attention_backend",
         "prefill_attention_backend", "decode_attention_backend", "page_size")
    )  # fmt: skip
    view = SimpleNamespace(**fields)
    for name in ("resolving_view", "resolved_view"):
        monkeypatch.setattr(model_override_base, name, lambda arguments: arguments)
    model = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
        has_asymmetric_kv=False, has_attention_sinks=False,
    )  # fmt: skip
    off = dict.fromkeys(("is_hopper_with_cuda_12_3", "is_sm100", "is_hip", "is_musa"), False)
    with override_platform(**off | {"has_flashinfer": True} | platform):
        chosen = model_override_base.get_default_attn_backend(view, False, model)
        view.attention_backend = chosen
        changed = overrides._mla_backend_page_constraints(view)
        changed = changed or overrides._page_size_default(view)
    assert (chosen, changed["page_size"]) == (backend, page)
    assert {Property.STORES_FIRST, Property.STRIDED} <= served.configured("cuda", chosen).has


def test_kv_pools_are_not_sized_after_graph_capture_unless_asked_for() -> None:
    assert envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.get() is False
    planned = inspect.getsource(overrides.post_capture_kv_sizing_planned)
    assert (
        "if not envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.get():\n        return False" in planned
    )


def test_every_power_is_implemented_on_the_cpu_and_on_cuda() -> None:
    assert dict(READY) == {"cpu": set(SECTIONS), "cuda": set(SECTIONS)}
    assert dict(served.TRIED) == {"cpu": READY["cpu"], "cuda": set()}
    assert set(SECTIONS) == {kind.name for kind in ORDER}
    assert set(served.SLAB_DEVICES) == {"cpu", "cuda"}


LISTED = runpy.run_path(str(ROOT / "scripts" / "list_served.py"))
PREFILL = ("restore", "chunks")
ALL, OWN = tuple(LISTED["POWERS"]), ("peer.stream layer",)
REFUSED = {
    ("cpu", "torch_native"): (),
    ("cpu", "triton"): (*OWN, "clusters"),
    ("cpu", "flex_attention"): (*PREFILL, *OWN, "clusters"),
    ("cpu", "intel_amx"): (*PREFILL, *OWN, "clusters"),
    ("cuda", "triton"): OWN,
    ("cuda", "fa3"): OWN,
    ("cuda", "fa4"): ALL,
    ("cuda", "flashinfer"): OWN,
    ("cuda", "trtllm_mha"): OWN,
    ("cuda", "torch_native"): OWN,
}


def test_the_table_of_combinations_follows_from_the_facts() -> None:
    table = list(LISTED["refusals"]())
    assert {(device, backend) for device, backend, *_ in table} == set(REFUSED)
    assert len(table) == len(REFUSED) * len(ALL)
    for device, backend, power, reason in table:
        assert bool(reason) == (power in REFUSED[device, backend]), (device, backend, power)
        if reason:
            assert "\n" not in reason
            assert backend in reason
            assert f"remove {power}" in reason


def test_requirements_are_those_of_the_power_that_is_listed() -> None:
    required = LISTED["required"]()
    for name, properties in required.items():
        assert set(properties.values()) <= {name, name.partition(".")[0]}
        assert properties[Property.STRIDED] == name.partition(".")[0]
    assert [name for name in required if Property.STORES_FIRST in required[name]] == [*PREFILL]
    assert [name for name in required if Property.OWN in required[name]] == [*OWN]
    page = LISTED["page"]()
    assert f"## cuda (implemented: {', '.join(sorted(READY['cuda']))})" in page
    assert "| triton | yes | yes | yes | yes | yes | no | no |" in page
    assert "| triton | yes | yes | yes | yes | yes | no | yes |" in page


def test_refusals_say_what_was_asked_what_was_found_and_what_to_do() -> None:
    texts = {(device, name, power): text for device, name, power, text in LISTED["refusals"]()}
    assert texts["cpu", "intel_amx", "restore"] == (
        "restore computes parts of a prompt in one forward, which requires a prefill backend that "
        "stores K and V before attention, and intel_amx is not known to do so; use "
        "--prefill-attention-backend torch_native or triton, or remove restore"
    )
    assert texts["cuda", "fa4", "tiers"] == (
        "tiers requires attention backends that read KV with any strides, and fa4 in prefill is "
        "not known to do so (its kernels of head_dim 256 take K and V for contiguous); use "
        "--attention-backend triton, fa3, flashinfer, trtllm_mha or torch_native, or remove tiers"
    )
    assert texts["cpu", "triton", "peer.stream layer"] == (
        "peer.stream layer requires the compiled CPU attention, but prefill runs triton; use "
        "--attention-backend torch_native for both phases, or remove peer.stream layer"
    )
    assert texts["cuda", "triton", "peer.stream layer"] == (
        "peer.stream layer requires the compiled CPU attention, but prefill runs triton; serve on "
        "the CPU, or remove peer.stream layer"
    )
    assert texts["cpu", "triton", "clusters"] == (
        "clusters requires the compiled CPU attention, but prefill runs triton; use "
        "--attention-backend torch_native for both phases, or remove clusters"
    )
    both = served.Phases(served.configured("cuda", "triton"), served.configured("cuda", "triton"))
    eager = {Property.EAGER_DECODE: "clusters"}
    assert served.refusal("cpu", both, "clusters", eager) == (
        "clusters requires a decode without CUDA graphs, but decode runs triton; use "
        "--attention-backend torch_native or flex_attention for both phases, or remove clusters"
    )
    assert served.refusal("rocm", both, "peer", {}) == (
        "peer is not implemented for the device rocm; serve on the CPU "
        "(SGLANG_PLATFORM=sgl_ext_cpu), or remove peer"
    )
    assert served.refusal("cpu", both, "tiers", {Property.STRIDED: "tiers"}) is None


def of_version(kind: type, version: int) -> object:
    backend = kind()
    vars(backend)["fa_impl_ver"] = version
    return backend


def test_versions_of_flash_attention_are_told_apart() -> None:
    kind = type("FlashAttentionBackend", (), {})
    kind.__module__ = kind_of("fa3").rpartition(".")[0]
    three, four, other = (served.running("cuda", of_version(kind, each)) for each in (3, 4, 5))
    assert Property.STRIDED in three.has
    assert Property.STRIDED not in four.has
    assert not other.has
    assert "fa_impl_ver=4" in inspect.getsource(ATTENTION_BACKENDS["fa4"])
    assert "self.fa_impl_ver = fa_impl_ver" in ast.unparse(method(kind_of("fa3"), "__init__"))
