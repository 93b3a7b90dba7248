"""The powers' fronts of SGLang's ``TokenizerManager``."""

from __future__ import annotations

from sgl_ext.engine.core.power import Front
from sgl_ext.engine.core.sglang_types import TokenizerManager

_FRONTS = "_ext_fronts"
"""Attribute of SGLang's ``TokenizerManager`` that holds the powers' fronts, from the inside out."""


def fronts_of(manager: TokenizerManager) -> tuple[Front, ...]:
    """Returns the powers' fronts of SGLang's ``TokenizerManager``, from the inside out."""
    fronts: tuple[Front, ...] = getattr(manager, _FRONTS, ())
    return fronts


def add_front(manager: TokenizerManager, front: Front) -> None:
    """Adds a front, outside of the fronts that SGLang's ``TokenizerManager`` has already."""
    setattr(manager, _FRONTS, (*fronts_of(manager), front))
