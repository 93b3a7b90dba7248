"""Benchmark of preempted requests."""
