"""Program that runs the Triton kernel for the log-sum-exp of logits in Triton's interpreter.

The environment has ``TRITON_INTERPRET=1``, which functions of Triton's own library need when they
are imported. The argument is the path of a file for a large sparse slab.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import torch

sys.path.append(str(Path(__file__).parents[2] / "kernels" / "triton"))
import checks
import sgl_ext_kernels as kernels
from sgl_ext_kernels import log_sums

CASES = 24


def by_definition() -> None:
    keys = torch.tensor([[[0.0]], [[1.0]], [[3.0]]]) * torch.ones(16)
    query = torch.ones(2, 2, 16) * torch.tensor([1.0, -2.0])[:, None] / 16
    table = torch.tensor([[2, 1, 0]], dtype=torch.int32)
    found = log_sums.log_sums(query, keys, table, torch.tensor([0, 0]), torch.tensor([2, 0]), 0.5)
    expected = torch.tensor([[1.5, 0.5], [-3.0, -1.0]]).logsumexp(1)
    torch.testing.assert_close(found[0], expected)
    assert found[1].tolist() == [-torch.inf] * 2


def main() -> None:
    by_definition()
    print("definition")
    for seed in range(CASES):
        checks.check_log_sums(kernels, Random(seed), torch.device("cpu"))  # noqa: S311
    print("random")
    # A sparse file: only the pages that are touched exist.
    memory = torch.from_file(sys.argv[1], shared=True, size=checks.far_bytes(2), dtype=torch.uint8)
    checks.check_far_log_sums(kernels, memory)
    print("far")


if __name__ == "__main__":
    main()
