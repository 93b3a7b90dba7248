"""Refusal of request parameters of sections that are off."""

from __future__ import annotations

from collections.abc import Mapping

from sgl_ext.engine.core.power import Front
from sgl_ext.engine.core.sglang_types import GenerateReqInput
from sgl_ext.engine.front.custom_params import custom_params
from sgl_ext.engine.front.errors import SectionOffError


class OffParams(Front):
    """Front that refuses the ``custom_params`` of sections that are off.

    SGLang ignores keys that it does not know, and would answer as if they had not been given.

    Args:
        sections: name of the section that is off, by the key of ``custom_params``.
    """

    def __init__(self, sections: Mapping[str, str]) -> None:
        self._sections = sections

    def accept(self, request: GenerateReqInput) -> None:
        """Refuses a request that has one of the keys.

        Raises:
            SectionOffError: it has.
        """
        params = getattr(request, "sampling_params", None)
        for each in params if isinstance(params, list) else [params]:
            custom = custom_params(each)
            for key, section in self._sections.items():
                if custom.get(key) is not None:
                    raise SectionOffError(
                        f"{key} requires the section {section}, which is off; "
                        "start the server with it in its --ext-config"
                    )
