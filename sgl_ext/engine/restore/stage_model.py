"""Pipeline stage of a model in its own process: SGLang's layers and KV pool, no scheduler."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_ext.engine.core.releases import forward_context
from sgl_ext.engine.restore.prompt_forward import extend_batch
from sgl_ext.memory.slab import Layout
from sgl_ext.tiers.arena import Pages

PAGE = 16
Inputs = NDArray[np.int64] | NDArray[np.float32]

_DTYPE = "float32"
_FIRST = PAGE
"""Slot of token 0; SGLang uses the first page for padding."""
_ROW = 1
"""Row of the prompt in SGLang's table of requests."""


def write_part(model: Path, first: int, end: int, folder: Path) -> None:
    """Writes layers ``first .. end - 1`` of ``model`` to ``folder`` as a separate model."""
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True)
    config = json.loads((model / "config.json").read_text())
    config["num_hidden_layers"] = end - first
    (folder / "config.json").write_text(json.dumps(config))
    for file in model.glob("*token*"):
        shutil.copy(file, folder)
    weights = {}
    for file in sorted(model.glob("*.safetensors")):
        for name, weight in load_file(file).items():
            head, found, rest = name.partition(".layers.")
            if found:
                number, _, rest = rest.partition(".")
                if not first <= int(number) < end:
                    continue
                name = f"{head}.layers.{int(number) - first}.{rest}"
            weights[name] = weight
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


class StageModel:
    """Layers of one stage, for one prompt whose token ``t`` is in slot ``PAGE + t``.

    Args:
        folder: folder that :func:`write_part` has written.
        tokens: tokens of the longest prompt.
        fingerprint: fingerprint of the layout of its KV.
    """

    def __init__(self, folder: Path, tokens: int, fingerprint: str) -> None:
        from sglang.benchmark import one_batch
        from sglang.srt.server_args import PortArgs, ServerArgs

        args = ServerArgs(
            model_path=str(folder), dtype=_DTYPE, page_size=PAGE, max_total_tokens=tokens + PAGE,
            disable_radix_cache=True, mem_fraction_static=0.5, device="cpu", log_level="error",
        )  # fmt: skip
        args.resolve_once()
        ranks = one_batch.SpawnRanks(
            world_rank=one_batch.spawn_world_rank(args, tp_rank=0, pp_rank=0), gpu_id=0
        )
        one_batch.publish(args, role="scheduler", ranks=ranks)
        one_batch._init_process_global_configs()
        loaded, _ = one_batch.load_model(args, PortArgs.init_new(args), 0, 0)
        self._runner = loaded.torch_runner
        self._model = self._runner.model.model
        self._pool = self._runner.token_to_kv_pool
        heads, width = self._pool.k_buffer[0].shape[1:]
        self.hidden: int = self._runner.model_config.hidden_size
        self.layout = Layout(PAGE, len(self._pool.k_buffer), heads, width, _DTYPE, fingerprint)
        table = self._runner.req_to_token_pool.req_to_token
        most = min(table.shape[1], tokens)
        table[_ROW, :most] = torch.arange(_FIRST, _FIRST + most)

    @torch.no_grad()
    def forward(self, inputs: Inputs, begin: int) -> NDArray[np.float32]:
        """Computes the KV of consecutive tokens from ``begin`` on.

        Args:
            inputs: token ids, int64 ``[tokens]``; or the inputs of the stage's first layer, float32
                ``[tokens, hidden]``.

        Returns:
            The inputs of the next stage's first layer, float32 ``[tokens, hidden]``.
        """
        from sglang.srt.layers.layer_boundary.residual import batch as residual
        from sglang.srt.model_executor.forward_context import ForwardContext

        given = torch.from_numpy(inputs)
        known = given.dtype == torch.int64
        ids = given if known else torch.zeros(len(given), dtype=torch.int64)
        slots = torch.arange(_FIRST + begin, _FIRST + begin + len(ids))
        batch = extend_batch(ids, _ROW, begin, slots)
        backend = self._runner.attn_backend
        backend.init_forward_metadata(batch)
        hidden = self._model.embed_tokens(ids) if known else given
        with forward_context(ForwardContext(attn_backend=backend), batch):
            residual.start(batch)
            for layer in self._model.layers:
                hidden = layer(batch.positions, hidden, batch)
            passed = residual.to_pp(hidden, batch)
        out: NDArray[np.float32] = (passed["hidden_states"] + passed["residual"]).numpy()
        return out

    def kv(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Returns the pages of tokens ``begin .. end - 1``, uint8 ``[pages, block_bytes]``."""
        slots = slice(_FIRST + begin, _FIRST + end)
        layers = [
            torch.stack((keys[slots], values[slots]), dim=1)
            for keys, values in zip(self._pool.k_buffer, self._pool.v_buffer, strict=True)
        ]
        tokens = torch.stack(layers, dim=1)  # [tokens, layers, 2, heads, width]
        pages = tokens.reshape((end - begin) // PAGE, -1).view(torch.uint8)
        found: NDArray[np.uint8] = pages.numpy()
        return found

    def adopt(self, begin: int, memory: NDArray[np.uint8], places: Pages) -> None:
        """Copies the KV of consecutive pages into the pool.

        Args:
            begin: first token of the pages.
            memory: host memory, uint8 ``[places, stride]``.
            places: places of the pages in ``memory``, in order.
        """
        layout = self.layout
        pages = torch.from_numpy(memory[places, : layout.block_bytes]).view(torch.float32)
        tokens = pages.reshape(-1, layout.layers, 2, layout.kv_heads, layout.head_dim)
        slots = slice(_FIRST + begin, _FIRST + begin + len(tokens))
        for layer in range(layout.layers):
            self._pool.k_buffer[layer][slots] = tokens[:, layer, 0]
            self._pool.v_buffer[layer][slots] = tokens[:, layer, 1]

    def forget(self) -> None:
        """Overwrites all KV with NaN."""
        for buffer in (*self._pool.k_buffer, *self._pool.v_buffer):
            buffer.fill_(float("nan"))
