"""Benchmark of the ``clusters`` power: decoding over contexts that are stored on SSDs."""
