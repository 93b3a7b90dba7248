"""Followers of stored contexts whose own tokens are in the KV pool of a CUDA device.

SGLang's attention backend attends to own tokens on the device, the native kernels attend to the
context in host memory, and both outputs are merged by the log-sum-exps of their logits. In each
layer of a forward with followers the host waits for the device once, for the queries.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sgl_ext.clusters.geometry import Geometry
from sgl_ext.engine.clusters.contexts import StoredContexts
from sgl_ext.engine.clusters.follower import Follower
from sgl_ext.engine.clusters.forward import StoredForward
from sgl_ext.engine.clusters.own import Own
from sgl_ext.engine.clusters.recorder import Recorder
from sgl_ext.engine.core.attention_backends import require_kernels, require_running
from sgl_ext.engine.core.served import Property
from sgl_ext.engine.core.sglang_types import ForwardBatch, KVPool, ModelRunner
from sgl_ext.engine.cpu.native_attention import NativeAttention, native_attention
from sgl_ext.engine.kv.indices import Download, upload
from sgl_ext.errors import ExtError
from sgl_ext.memory.slab import Layout


class DeviceForward:
    """Rows of a forward that follow contexts, on a device.

    An error ends the followers' requests; the other rows of the forward continue.

    Args:
        stored: registry of the contexts.
        followers: follower of each row; None for a row that follows no context.
        lengths: number of new tokens of each row.
        batch: SGLang's batch of the forward.
        table: KV slots, int32 ``[requests, width]`` on the device.
        pool: SGLang's KV pool on the device.
        geometry: geometry of the model.
        native: kernels of the host.
        missing: number of layers that compute the rows.
    """

    def __init__(
        self,
        stored: StoredContexts,
        followers: Sequence[Follower | None],
        lengths: Sequence[int],
        batch: ForwardBatch,
        *,
        table: torch.Tensor,
        pool: KVPool,
        geometry: Geometry,
        native: NativeAttention,
        missing: int,
    ) -> None:
        new = np.array(lengths, np.int64)
        self._forward = StoredForward(
            stored, followers, lengths, lambda some: Own.elsewhere(int(new[list(some)].sum()))
        )
        self._table, self._pool, self._geometry, self._native = table, pool, geometry, native
        self._nothing = torch.empty(
            0, geometry.kv_heads, geometry.head_dim, dtype=getattr(torch, geometry.dtype)
        )
        rows = np.repeat(self._forward.rows, new[self._forward.rows])
        behind = np.cumsum(new)[rows] - 1 - self._forward.followed.numpy()
        where = upload(
            torch.from_numpy(np.stack([self._forward.followed.numpy(), rows, behind, new[rows]])),
            batch.seq_lens.device,
        )
        self.followed = where[0]
        """Indices of the followers' queries in the forward, int64 ``[followed]`` on the device."""
        self._requests = batch.req_pool_indices[where[1]].long()
        ends = batch.seq_lens[where[1]].long()
        self._lengths, self._before = ends - where[2], ends - where[3]
        self.missing = missing
        """Number of layers whose attention to the contexts is still missing."""

    def prefetch(self, layer: int, query: torch.Tensor, keys: torch.Tensor, times: float) -> None:
        """See :meth:`StoredForward.prefetch`; the tensors are on the device."""
        try:
            asked, beside = Download(query), Download(self._sums(query, keys, self._before))
            # The second copy lands after the first one.
            known = beside.tensor().numpy()
            self._forward.prefetch(layer, asked.tensor(), self._nothing, times, known)
        except Exception as error:
            self._forward.fail(error)

    def merge(self, layer: int, query: torch.Tensor, out: torch.Tensor) -> None:
        """Merges the attention of followers to their own tokens with that to their contexts.

        Call it when the work is launched that writes ``out`` and the layer's K.

        Args:
            layer: number of the layer in the pool, from 0.
            query: queries of all rows, ``[tokens, heads * head_dim]``.
            out: output of SGLang's attention backend for these queries, of as many elements; only
                the followers' rows are written.
        """
        try:
            self._merge(layer, query, out)
        except Exception as error:
            self._forward.fail(error)
        self.missing -= 1

    def _merge(self, layer: int, query: torch.Tensor, out: torch.Tensor) -> None:
        shape = (-1, self._geometry.heads, self._geometry.head_dim)
        query, out = query.view(shape)[self.followed], out.view(shape)
        keys = self._pool.get_key_buffer(self._pool.start_layer + layer)
        own = self._sums(query, keys, self._lengths)
        asked, beside = Download(query), Download(own)
        sums = torch.empty(own.shape, dtype=torch.float32)
        # The second copy lands after the first one.
        known = beside.tensor().numpy()
        found = self._forward.attend(
            self._native, layer, asked.tensor(), self._nothing, self._nothing, known, sums
        )
        # The share of the context in the sum of all weights.
        share = torch.sigmoid(upload(sums, out.device) - own).unsqueeze(-1)
        there = upload(found, out.device).float()
        merged = torch.lerp(out[self.followed].float(), there, share)
        out.index_copy_(0, self.followed, merged.to(out.dtype))

    def _sums(self, query: torch.Tensor, keys: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Returns the log-sum-exps of the logits of own tokens, float32 ``[followed, heads]``."""
        from sgl_ext_kernels import log_sums  # imports Triton, which only a device needs

        return log_sums.log_sums(
            query, keys, self._table, self._requests, lengths, self._geometry.scale
        )

    def fail_as_incomplete(self) -> None:
        """Ends the followers' requests because the attention of some layers is missing."""
        layers = self._geometry.layers
        self._forward.fail(
            ExtError(
                f"the model called SGLang's attention in {layers - self.missing} of {layers} "
                "layers; serve another model, or remove clusters"
            )
        )


class DeviceAttention:
    """Attention of followers, and recording of queries, in the forwards of a scheduler on a device.

    Args:
        stored: registry of the contexts.
        recorder: recorder of prompts that are being stored, which has begun with each forward.
        runner: SGLang's model runner.
        layout: layout of the KV pool.
        geometry: geometry of the model.

    Raises:
        ExtError: a running attention backend, or the kernels of the host, do not serve followers.
    """

    def __init__(
        self,
        stored: StoredContexts,
        recorder: Recorder,
        runner: ModelRunner,
        layout: Layout,
        geometry: Geometry,
    ) -> None:
        require_running(runner, {Property.FOLLOWERS: "clusters"})
        native = native_attention()
        require_kernels(
            lambda *given: native is not None and native.serves(*given),
            runner, layout, geometry.scale, "clusters",
        )  # fmt: skip
        assert native is not None  # noqa: S101
        self._stored, self._recorder = stored, recorder
        self._runner, self._geometry, self._native = runner, geometry, native
        self._running: DeviceForward | None = None

    @property
    def eager(self) -> bool:
        """True if the current forward has to call :meth:`attended`, which a CUDA graph does not."""
        return self._running is not None or self._recorder.taking

    def begin(
        self,
        batch: ForwardBatch,
        followers: Sequence[Follower | None],
        lengths: Sequence[int],
    ) -> None:
        """Begins a forward.

        Args:
            batch: SGLang's batch of the rows that are computed.
            followers: see :meth:`StoredContexts.followers`.
            lengths: number of new tokens of each row.
        """
        self.end()
        self._follow(batch, followers, lengths, self._geometry.layers)

    def go_on(
        self,
        batch: ForwardBatch,
        followers: Sequence[Follower | None],
        lengths: Sequence[int],
    ) -> None:
        """Continues the forward with other rows of the same requests.

        Args:
            batch: see :meth:`begin`.
            followers: see :meth:`begin`.
            lengths: see :meth:`begin`.
        """
        if (first := self._running) is not None:
            self._follow(batch, followers, lengths, first.missing)

    def _follow(
        self,
        batch: ForwardBatch,
        followers: Sequence[Follower | None],
        lengths: Sequence[int],
        layers: int,
    ) -> None:
        if followers:
            runner = self._runner
            self._running = self._stored.running = DeviceForward(
                self._stored, followers, lengths, batch,
                table=runner.req_to_token_pool.req_to_token, pool=runner.token_to_kv_pool,
                geometry=self._geometry, native=self._native, missing=layers,
            )  # fmt: skip

    def attended(self, layer_id: int, query: torch.Tensor, out: torch.Tensor) -> None:
        """Completes the attention of a layer. Its K and output come from the current stream.

        Args:
            layer_id: SGLang's number of the layer.
            query: see :meth:`DeviceForward.merge`.
            out: see :meth:`DeviceForward.merge`.
        """
        layer = layer_id - self._runner.token_to_kv_pool.start_layer
        if self._recorder.taking:
            shape = (-1, self._geometry.heads, self._geometry.head_dim)
            self._recorder.take(layer, query.view(shape))
        if self._running is not None:
            self._running.merge(layer, query, out)
            if not self._running.missing:
                self._running = self._stored.running = None

    def end(self) -> None:
        """Ends the followers' requests if the latest forward has not called all attention layers.

        Without them its output is that of prompts without their contexts.
        """
        if self._running is not None:
            self._running.fail_as_incomplete()
            self._running = self._stored.running = None
