"""Benchmark of all powers together on one server."""
