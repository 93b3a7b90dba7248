"""Names of the element types of quantized weights, which SGLang's quantization modules import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScalarType:
    """Element type of quantized weights, by its name."""

    name: str


class scalar_types:  # noqa: N801
    """Element types that SGLang's tables of quantization methods name."""

    uint4 = ScalarType("uint4")
    uint8 = ScalarType("uint8")
    uint4b8 = ScalarType("uint4b8")
    uint8b128 = ScalarType("uint8b128")
    float8_e4m3fn = ScalarType("float8_e4m3fn")
    float4_e2m1f = ScalarType("float4_e2m1f")
