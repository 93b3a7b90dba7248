"""Protocols of SGLang's classes, with the attributes and methods that the engine uses.

SGLang ships no type information. These protocols name everything that the engine relies on, so that
a new version of SGLang can be compared with one file. Names and meanings are SGLang's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NewType, Protocol

import torch

if TYPE_CHECKING:
    from sgl_ext.engine.kv.known import KnownSlots
    from sgl_ext.memory.in_flight import BlocksInFlight
    from sgl_ext.memory.streams import Streams

Node = NewType("Node", int)
"""SGLang's ``NodeId`` of a node of ``UnifiedRadixCache``."""


class TreeLock(Protocol):
    """Protocol of ``sglang.srt.mem_cache.base_prefix_cache.TreeLock``, which only SGLang reads."""

    node: Node


class MatchResult(Protocol):
    """Protocol of ``sglang.srt.mem_cache.base_prefix_cache.MatchResult``."""

    @property
    def device_prefix_len(self) -> int: ...

    @property
    def last_device_node(self) -> Node: ...


class PathNode(Protocol):
    """Protocol of an entry of ``tree_core.collect_path_info``."""

    node_id: Node


class ForwardMode(Protocol):
    """Protocol of ``sglang.srt.model_executor.forward_batch_info.ForwardMode``."""

    @property
    def name(self) -> str: ...

    def is_extend(self) -> bool: ...

    def is_extend_without_speculative(self) -> bool: ...

    def is_decode_or_idle(self) -> bool: ...


class ModelConfig(Protocol):
    """Protocol of ``sglang.srt.configs.model_config.ModelConfig``."""

    context_len: int
    vocab_size: int
    hidden_size: int
    hf_config: Any
    hf_text_config: Any
    quantization: str | None
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    num_attention_heads: int
    num_hidden_layers: int
    is_multimodal: bool

    def get_num_kv_heads(self, tensor_parallel: int) -> int: ...


class SamplingParams(Protocol):
    """Protocol of ``sglang.srt.sampling.sampling_params.SamplingParams``."""

    max_new_tokens: int
    min_new_tokens: int
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    custom_params: dict[str, Any] | None
    stop_regex_strs: Sequence[str]
    stop_token_ids: Iterable[int] | None
    logit_bias: MutableMapping[str, float] | None


class KVRecord(Protocol):
    """Protocol of ``Req.kv``, a request's row of slots."""

    req_pool_idx: int
    holds_kv: bool
    kv_allocated_len: int
    kv_committed_len: int
    cache_protected_len: int


class BeamGroup(Protocol):
    """Protocol of ``Req.beam_group`` of a group's leader."""

    beam_width: int
    member_rows: Sequence[int] | None
    retired: bool
    num_generated: int

    def extra_uncached_tokens(self) -> int: ...


class TimeStats(Protocol):
    """Protocol of ``Req.time_stats``, in seconds."""

    wait_queue_entry_time: float
    queue_duration_s: float
    trace_ctx: Any

    def trace_slice(
        self, stage: object, start_time: float, end_time: float, attrs: dict[str, Any] | None
    ) -> None: ...


class Req(Protocol):
    """Protocol of ``sglang.srt.managers.schedule_batch.Req``."""

    rid: str
    origin_input_ids: list[int]
    output_ids: list[int]
    full_untruncated_fill_ids: Sequence[int]
    sampling_params: SamplingParams
    kv: KVRecord
    beam_group: BeamGroup | None
    time_stats: TimeStats
    priority: int
    extra_key: str | None
    cache_salt: str | None
    session: object | None
    prefix_len: int
    extend_len: int
    extend_end: int
    host_hit_length: int
    last_node: Node
    lock: TreeLock | None
    cached_tokens: int
    cached_tokens_device: int
    cached_tokens_host: int
    cached_tokens_storage: int
    customized_info: dict[str, Any] | None
    stream: bool
    to_finish: object | None
    finished_reason: object | None
    finished_len: int | None
    inflight_middle_chunks: int
    retraction_count: int
    retracted_stain: bool
    is_retracted: bool
    is_prefill_only: bool
    skip_radix_cache_insert: bool
    return_logprob: bool
    logprob_start_len: int
    return_hidden_states: bool
    return_routed_experts: bool
    return_indexer_topk: bool
    multimodal_inputs: object | None
    input_embeds: object | None
    positional_embed_overrides: object | None

    def finished(self) -> bool: ...

    def reset_for_retract(self) -> None: ...

    def set_finish_with_abort(self, message: str, status: int = ...) -> None: ...

    def init_next_round_input(self, tree: RadixTree, cow_mamba: bool | None = None) -> None: ...

    def _compute_max_prefix_len(self, tokens: int) -> int: ...


class ReqToTokenPool(Protocol):
    """Protocol of ``sglang.srt.mem_cache.memory_pool.ReqToTokenPool``."""

    req_to_token: torch.Tensor
    """Slot of each token, int32 ``[rows, width]``."""

    def available_size(self) -> int: ...


class KVPool(Protocol):
    """Protocol of ``sglang.srt.mem_cache.memory_pool.KVCache``."""

    start_layer: int

    def get_key_buffer(self, layer_id: int) -> torch.Tensor: ...

    def get_value_buffer(self, layer_id: int) -> torch.Tensor: ...


class Allocator(Protocol):
    """Protocol of ``sglang.srt.mem_cache.allocator.base.BaseTokenToKVPoolAllocator``."""

    page_size: int
    size: int
    device: str
    in_flight: BlocksInFlight | None
    streams: Streams
    known: KnownSlots

    def available_size(self) -> int: ...

    def alloc(self, tokens: int) -> torch.Tensor | None: ...

    def free(self, slots: torch.Tensor) -> None: ...

    def get_kvcache(self) -> KVPool: ...


class TreeCore(Protocol):
    """Protocol of ``UnifiedRadixCache.tree_core``, the nodes of the tree."""

    def collect_path_info(self, nodes: Sequence[Node]) -> list[list[PathNode]]: ...

    def collect_full_device_indices(self, node: Node, root: Node) -> torch.Tensor: ...

    def get_component_device_value(self, node: Node, kind: object) -> torch.Tensor | None: ...

    def get_hash_values(self, node: Node) -> Sequence[str]: ...

    def prefetch_anchor_info(self, node: Node) -> tuple[str | None, str | None]: ...

    def full_evictable_size(self) -> int: ...

    def evict_device_start(self, kind: object, tokens: int) -> None: ...

    def evict_device_next_node(self, kind: object, tracker: object) -> EvictionStep: ...

    def evict_device_end(self, kind: object) -> None: ...


class EvictionStep(Protocol):
    """Protocol of the result of ``TreeCore.evict_device_next_node``."""

    node_id: Node | None


class LinkerWrapper(Protocol):
    """Protocol of ``UnifiedRadixCache.linker``, SGLang's side of a cache linker."""

    cache: RadixTree
    cache_linker: Any
    hit_markers: MutableMapping[str, object]
    private_load_indices: Any
    pending_offloads: Any

    def take_completed_offloads(self, count: int) -> Any: ...

    def commit_completed_offloads(self, completed: Any) -> None: ...


class RadixTree(Protocol):
    """Protocol of ``sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache``."""

    page_size: int
    linker: LinkerWrapper
    tree_core: TreeCore
    tree_components: Iterable[object]
    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool_allocator: Allocator

    def lock(self, node: Node) -> TreeLock: ...

    def unlock(self, lock: TreeLock | None) -> None: ...

    def insert(self, params: object) -> object: ...

    def match_prefix(self, params: object) -> MatchResult: ...

    def path_device_indices(self, node: Node) -> torch.Tensor: ...

    def evictable_size(self) -> int: ...

    def protected_size(self) -> int: ...

    def get_prefix_hash_values(self, node: Node) -> Sequence[str]: ...

    def session_records(self) -> MutableMapping[str, KVRecord]: ...

    def root_node_handle(self, namespace: str | None) -> Node: ...

    def _evict_device_leaf(self, leaf: Node, tracker: object) -> None: ...


class ScheduleBatch(Protocol):
    """Protocol of ``sglang.srt.managers.schedule_batch.ScheduleBatch``."""

    reqs: list[Req]
    out_cache_loc: torch.Tensor
    batch_is_full: bool
    forward_mode: ForwardMode
    prefix_lens: Sequence[int]
    extend_lens: Sequence[int]
    extend_num_tokens: int
    hicache_consumer_index: int
    tree_cache: RadixTree
    req_pool_indices: torch.Tensor
    req_pool_indices_cpu: torch.Tensor
    enable_overlap: bool
    return_logprob: bool
    sampling_info: Any
    device: str

    def is_empty(self) -> bool: ...

    def filter_batch(self, *, keep_indices: Sequence[int]) -> None: ...

    def merge_batch(self, other: ScheduleBatch) -> None: ...

    def release_req(self, at: int, remaining: int) -> None: ...


class StepPlan(Protocol):
    """Protocol of the result of ``Scheduler.get_new_batch_prefill``."""

    running_batch: ScheduleBatch


class MemoryBudget(Protocol):
    """Protocol of ``PrefillAdder.memory_budget``, in tokens."""

    total_offset: float
    remaining_total: float

    def ceil_paged_tokens(self, tokens: int) -> int: ...


class PrefillAdder(Protocol):
    """Protocol of ``sglang.srt.managers.schedule_policy.PrefillAdder``."""

    page_size: int
    tree_cache: RadixTree
    running_batch: ScheduleBatch
    can_run_list: list[Req]
    preempt_list: list[Req]
    new_chunked_req: Req | None
    chunked_req_limit: int | None
    memory_budget: MemoryBudget
    max_running_requests: int | None
    per_req_token_overhead: int
    priority_scheduling_preemption_threshold: int
    rem_total_tokens: float
    rem_chunk_tokens: int
    rem_input_tokens: int
    log_hit_tokens: int
    log_input_tokens: int
    log_replay_tokens: int
    reprocessed_log_hit_tokens: int
    reprocessed_log_input_tokens: int

    def _lock_node(self, node: Node) -> AbstractContextManager[None]: ...

    def _get_running_request_total_token_offset(self, req: Req) -> float: ...


class BeamCoordinator(Protocol):
    """Protocol of ``Scheduler.beam_coordinator``."""

    def retire_group(self, req: Req) -> None: ...

    def _free_member_rows(self, group: BeamGroup | None) -> None: ...


class TpWorker(Protocol):
    """Protocol of ``sglang.srt.managers.tp_worker.TpModelWorker``."""

    model_runner: ModelRunner


class Scheduler(Protocol):
    """Protocol of ``sglang.srt.managers.scheduler.Scheduler``."""

    page_size: int
    device: str
    forward_stream: Any
    schedule_stream: Any
    waiting_queue: list[Req]
    chunked_req: Req | None
    running_batch: ScheduleBatch
    running_mbs: list[ScheduleBatch]
    last_batch: ScheduleBatch | None
    cur_batch_for_debug: ScheduleBatch | None
    tree_cache: RadixTree
    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool_allocator: Allocator
    tp_worker: TpWorker
    model_config: ModelConfig
    future_map: Any
    spec_algorithm: object
    enable_overlap: bool
    beam_coordinator: BeamCoordinator
    grammar_manager: Any
    idle_sleeper: Any
    invariant_checker: Any
    pool_stats_observer: Any
    new_token_ratio_tracker: Any
    forward_ct: int
    chunked_prefill_size: int | None
    truncation_align_size: int | None
    max_queued_requests: int | None
    max_req_len: int
    max_req_input_len: int
    max_total_num_tokens: int
    metrics_collector: Any | None
    ipc_channels: Any

    def collect_inflight_reqs(self) -> Iterable[Req]: ...

    def _add_request_to_queue(self, req: Req, *, is_retracted: bool) -> None: ...

    def _release_aborted_request(self, req: Req) -> None: ...


class KVCacheConfigurator(Protocol):
    """Protocol of SGLang's ``KVCacheConfigurator``, which builds the pools of a model runner."""

    device: str
    model: torch.nn.Module
    model_config: ModelConfig
    kv_cache_dtype: torch.dtype
    kv_shard_rank: int | None
    post_capture_kv_active: bool
    is_draft_worker: bool
    layer_info: Any


class ModelRunner(Protocol):
    """Protocol of ``sglang.srt.model_executor.model_runner.ModelRunner``."""

    model: Any
    model_config: ModelConfig
    device: str
    dtype: torch.dtype
    attn_backend: Any
    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool: KVPool
    token_to_kv_pool_allocator: Allocator


class ForwardBatch(Protocol):
    """Protocol of ``sglang.srt.model_executor.forward_batch_info.ForwardBatch``."""

    rids: Sequence[str]
    batch_size: int
    forward_mode: ForwardMode
    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    seq_lens_sum: int
    req_pool_indices: torch.Tensor
    req_pool_indices_cpu: torch.Tensor | None
    extend_prefix_lens_cpu: list[int]
    extend_seq_lens_cpu: list[int]
    extend_seq_lens: torch.Tensor
    extend_prefix_lens: torch.Tensor
    extend_start_loc: torch.Tensor
    extend_num_tokens: int
    extend_logprob_start_lens_cpu: list[int] | None
    orig_seq_lens: torch.Tensor | None
    lora_ids: list[str | None] | None
    num_token_non_padded: torch.Tensor | None
    num_token_non_padded_cpu: int
    replace_positions: torch.Tensor | None
    hidden_states: object
    residual_stream: Any
    return_logprob: bool
    encoder_lens: torch.Tensor | None


class RadixAttention(Protocol):
    """Protocol of ``sglang.srt.layers.radix_attention.RadixAttention``."""

    layer_id: int
    attn_type: object
    is_cross_attention: bool
    logit_cap: float
    qk_head_dim: int
    scaling: float
    sliding_window_size: int
    tp_q_head_num: int
    use_irope: bool
    xai_temperature_len: int


class ServerArgs(Protocol):
    """Protocol of ``sglang.srt.server_args.ServerArgs``."""

    model_path: str
    revision: str | None
    load_format: str
    host: str | None
    port: int
    api_key: str | None
    enable_metrics: bool
    enable_lora: bool | None
    lora_paths: object | None
    tp_size: int
    pp_size: int
    attn_dp_size: int
    radix_eviction_policy: str
    enable_priority_scheduling: bool
    disable_priority_preemption: bool
    max_queued_requests: int | None
    schedule_low_priority_values_first: bool
    schedule_policy: str
    cuda_graph_config: Any
    enable_torch_compile: bool
    enable_two_batch_overlap: bool
    attention_backend: str | None
    prefill_attention_backend: str | None
    decode_attention_backend: str | None
    page_size: int
    chunked_prefill_size: int | None
    disable_radix_cache: bool
    kv_cache_dtype: str
    device: str
    disaggregation_mode: str | None
    enable_pdmux: bool
    kv_canary: str | None
    enable_unified_memory: bool
    enable_kv_cache_sharding: bool
    enable_memory_saver: bool
    enable_hisparse: bool
    dcp_size: int
    prefill_only_disable_kv_cache: bool
    tokenizer_metrics_allowed_custom_labels: list[str] | None

    def url(self) -> str: ...


class GenerateReqInput(Protocol):
    """Protocol of ``sglang.srt.managers.io_struct.GenerateReqInput``, before it is normalized.

    Most values are a client's, of any type.
    """

    rid: Any
    text: Any
    input_ids: Any
    sampling_params: Any
    cache_salt: Any
    extra_key: Any
    logprob_start_len: Any
    return_logprob: Any
    is_single: bool

    def normalize_batch_and_arguments(self) -> None: ...


class TokenizedReqInput(Protocol):
    """Protocol of ``sglang.srt.managers.io_struct.TokenizedGenerateReqInput``."""

    rid: str
    input_ids: Sequence[int] | None
    input_embeds: object | None
    mm_inputs: object | None
    positional_embed_overrides: object | None
    sampling_params: SamplingParams
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: Sequence[int] | None
    session_params: object | None
    time_stats: object | None


class TokenizerManager(Protocol):
    """Protocol of ``sglang.srt.managers.tokenizer_manager.TokenizerManager``."""

    server_args: ServerArgs
    model_config: ModelConfig
    context_len: int
    tokenizer: Any
    sampling_params_class: type
    generate_request: Callable[..., Any]

    def abort_request(self, rid: str) -> None: ...

    async def set_internal_state(self, request: object) -> list[bool]: ...
