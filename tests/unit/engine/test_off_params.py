"""Parameters of sections that are off are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sgl_ext.engine.front.errors import SectionOffError
from sgl_ext.engine.front.off_params import OffParams

FRONT = OffParams({"ext_stored": "clusters"})


def request(params: object) -> Any:
    return SimpleNamespace(sampling_params=params)


@pytest.mark.parametrize("several", [False, True])
def test_a_parameter_of_a_section_that_is_off_is_refused(several: bool) -> None:
    params: Any = {"custom_params": {"ext_stored": {"id": "stx-1"}}}
    with pytest.raises(SectionOffError, match="requires the section clusters") as refused:
        FRONT.accept(request([{}, params] if several else params))
    assert refused.value.status == 404


@pytest.mark.parametrize(
    "params",
    [None, {}, {"custom_params": None}, {"custom_params": {"other": 1}}, [{}, {"custom_params": 7}],
     {"custom_params": {"ext_stored": None}}],
)  # fmt: skip
def test_other_requests_are_accepted(params: object) -> None:
    FRONT.accept(request(params))


def test_requests_without_sampling_parameters_are_accepted() -> None:
    FRONT.accept(SimpleNamespace())  # requests for embeddings
