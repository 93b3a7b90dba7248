"""Tests of contexts on an engine without an HTTP server."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from engine_kit import run_program

from sgl_ext.bench.data.texts import sharegpt_prompts
from sgl_ext.errors import ExtError
from sgl_ext.offline import contexts_of

PROGRAM = """
import json, sys
from sglang.srt.entrypoints.engine import Engine
from sgl_ext.errors import ExtError
from sgl_ext.offline import contexts_of

def main():
    model, texts = json.load(open(sys.argv[1]))
    engine = Engine(model_path=model, page_size=16, max_total_tokens=8192, dtype="float32",
                    log_level="warning", enable_ext=True,
                    ext_config={"chunks": {"method": "lego-8", "link": "always"}})
    contexts = contexts_of(engine)
    how = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    found = {}

    def ask(name, *parts):
        answer = engine.generate(prompt=contexts.prompt(*parts), sampling_params=how)
        found[name] = [answer["output_ids"], answer["meta_info"].get("ext")]

    one, two = contexts.create(texts[:2])
    ask("moved", "Read this. ", two, one, "Well?")
    parts = ["Read this. ", *contexts.create(texts[:2], method="full"), "Well?"]
    ask("full", *parts)
    encode = engine.tokenizer_manager.tokenizer.encode
    ids = [token for at, text in enumerate(["Read this. ", *texts[:2], "Well?"])
           for token in encode(text, add_special_tokens=at == 0)]
    found["stock"] = engine.generate(input_ids=ids, sampling_params=how)["output_ids"]
    found["split"] = len(contexts.create(texts[0], split={"by": "tokens", "tokens": 50}))
    found["listed"] = len(contexts.list())
    contexts.delete(one.id)
    errors = found["errors"] = []
    for call in (
        lambda: ask("gone", one, "Well?"),
        lambda: contexts.get(one.id),
        lambda: contexts_of(engine, "other").get(two.id),
        lambda: contexts.create("x", split={"by": "chapter"}),
        lambda: contexts.create([""]),
    ):
        try:
            call()
        except (ValueError, ExtError) as error:  # SGLang's, or ours
            errors.append(str(error))
    print(json.dumps(found))
    engine.shutdown()

if __name__ == "__main__":
    main()
"""


def test_an_engine_creates_links_and_deletes_contexts(model: Path, tmp_path: Path) -> None:
    texts = [text[:1200] for text in sharegpt_prompts(2, characters=(1300, 4000))]
    (found,), _ = run_program(tmp_path, PROGRAM, [str(model), texts])
    _, (entry,) = found["moved"]
    assert (entry["method"], entry["recomputed"], entry["missing"]) == ("lego-8", 16, 0)
    assert entry["linked"] > 200
    assert found["full"][0] == found["stock"]
    assert found["split"] >= 4
    assert found["listed"] == 4 + found["split"]
    gone, got, other, split, empty = found["errors"]
    for error in (gone, got, other):
        assert "does not exist" in error
    assert "split.by" in split
    assert "chunk 0 is empty" in empty


def test_contexts_require_an_engine_with_chunks() -> None:
    with pytest.raises(ExtError, match="chunks are not enabled on this engine"):
        contexts_of(SimpleNamespace(server_args=SimpleNamespace()))
