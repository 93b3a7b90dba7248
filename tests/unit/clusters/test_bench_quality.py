"""Quality of answers over stored contexts: what is stored, asked, scored and deleted."""

from __future__ import annotations

from typing import Any

import pytest

from sgl_ext.bench.chunks.prompts import Template
from sgl_ext.bench.clusters import answers, quality
from sgl_ext.bench.clusters.quality import QualitySizes, add_scores, kinds, score, scores_of
from sgl_ext.bench.harness.report import Report
from sgl_ext.errors import ExtError
from sgl_ext.models import SMOLLM2, prepare


@pytest.fixture(scope="module")
def template() -> Template:
    return Template.of_model(prepare(SMOLLM2))


def test_an_answer_is_scored_by_words_and_by_what_it_has() -> None:
    assert score(" 123456 .", ["123456"]) == {"f1": 1.0, "found": 1.0}
    assert score("it is 123456", ["123456"])["found"] == 1.0
    assert score("123", ["123456"]) == {"f1": 0.0, "found": 0.0}


def test_shares_are_compared_with_dense_attention() -> None:
    report = Report("clusters", {})
    right, wrong = {"f1": 1.0, "found": 1.0}, {"f1": 0.0, "found": 0.0}
    few = [{"dense": right, "0.1": right}, {"dense": right, "0.1": wrong}]
    add_scores(report, "needle in 8 tokens", [*few, {"dense": wrong, "0.1": wrong}])
    dense, tenth = report.runs
    assert (dense["system"], dense["score"], dense["lost"]) == ("dense", pytest.approx(2 / 3), 0)
    assert (tenth["score"], tenth["lost"]) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert report.figures == {"quality_needle_in_8_tokens_0.1_of_dense": 0.5}


def test_prompts_hide_needles_and_ask_about_documents(template: Template) -> None:
    found = kinds(template, QualitySizes(needles=2, lengths=(1024,), questions=3))
    assert {kind: len(prompts) for kind, prompts in found.items()} == {
        "needle in 1024 tokens": 2, "questions about documents": 3,
    }  # fmt: skip
    assert (
        len({prompt.name.partition("/")[0] for prompt in found["questions about documents"]}) == 3
    )


@pytest.mark.parametrize("fails", [False, True])
def test_the_context_is_stored_without_its_question(
    template: Template, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    prompt = kinds(template, QualitySizes(1, (1024,), 3))["needle in 1024 tokens"][0]
    stored: list[list[int]] = []
    asked: list[tuple[list[int], Any]] = []
    deleted: list[str] = []

    class Contexts:
        def __init__(self, _url: str) -> None:
            pass

        def store(self, tokens: list[int]) -> dict[str, str]:
            stored.append([*tokens])
            return {"id": "stx-1"}

        def delete(self, id_: str) -> None:
            deleted.append(id_)

    def send(_url: str, tokens: list[int], parameters: dict[str, Any]) -> dict[str, Any]:
        if fails:
            raise ExtError("refused")
        asked.append(([*tokens], parameters.get("custom_params")))
        return {"text": prompt.answers[0] if "custom_params" not in parameters else "no"}

    monkeypatch.setattr(answers, "StoredContexts", Contexts)
    monkeypatch.setattr(quality, "send", send)
    if fails:
        with pytest.raises(ExtError, match="refused"):
            scores_of("http://server", template, prompt)
    else:
        scores = scores_of("http://server", template, prompt)
        assert [scores[system]["found"] for system in ("dense", "0.05", "0.1", "0.25")] == [
            1,
            0,
            0,
            0,
        ]
        whole = next(tokens for tokens, custom in asked if custom is None)
        follow = {custom["ext_stored"]["sparsity"]: tokens for tokens, custom in asked if custom}
        assert {*follow} == {0.05, 0.1, 0.25}
        assert all([*stored[0], *tokens] == whole for tokens in follow.values())
    assert deleted == ["stx-1"]
