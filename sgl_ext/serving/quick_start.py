"""Quick start of SGLang, which imports only the models that are served here."""

from __future__ import annotations

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_SERVED = {"llama", "mistral", "qwen2", "qwen3", "transformers"}
"""Modules of the served models; other model modules that they need are imported nevertheless."""
_ARCHITECTURES = {
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
}  # fmt: skip
"""Architectures that these modules implement."""


@cache
def environment() -> dict[str, str]:
    """Returns environment variables of a server process, with which it starts seconds earlier."""
    spec = find_spec("sglang")
    if spec is None or spec.origin is None:
        return {}
    models = Path(spec.origin).parent / "srt" / "models"
    others = sorted({file.stem for file in models.glob("*.py")} - _SERVED)
    return {"SGLANG_DISABLED_MODEL_ARCHS": ",".join(others)}


def environment_for(model: Path) -> dict[str, str]:
    """Returns :func:`environment`, or nothing if the model folder ``model`` needs other modules.

    SGLang would serve such a model by the implementation of ``transformers`` instead of its own.
    """
    try:
        config = json.loads((model / "config.json").read_bytes())
        architectures = {*config["architectures"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return environment() if architectures and architectures <= _ARCHITECTURES else {}
