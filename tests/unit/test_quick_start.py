"""Which models are served with few of SGLang's model modules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sgl_ext.models import SMOLLM2, prepare
from sgl_ext.serving.quick_start import environment, environment_for


def test_packaged_models_start_quickly() -> None:
    assert environment_for(prepare(SMOLLM2)) == environment() != {}


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["GemmaForCausalLM"]},
        {"architectures": ["LlamaForCausalLM", "GemmaForCausalLM"]},
        {"architectures": []}, {"architectures": None}, {}, [], "not JSON",
    ],
)  # fmt: skip
def test_other_models_have_all_modules(config: object, tmp_path: Path) -> None:
    text = config if isinstance(config, str) else json.dumps(config)
    (tmp_path / "config.json").write_text(text)
    assert environment_for(tmp_path) == {}


def test_a_folder_without_configuration_has_all_modules(tmp_path: Path) -> None:
    assert environment_for(tmp_path) == {}
