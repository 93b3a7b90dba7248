"""Benchmark of the attention over the slab and of the transfer engine."""
