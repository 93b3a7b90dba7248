"""Benchmark of the ``tiers`` power: KV in host memory and on SSDs."""
