"""Benchmark of restored prefixes."""
