"""Benchmark of well-known workloads: SGLang, HiCache, ``tiers``, ``restore`` and ``chunks``."""
