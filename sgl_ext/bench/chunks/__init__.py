"""Benchmark of linked chunks."""
