"""Servers, load, samples and reports that the benchmarks share."""
