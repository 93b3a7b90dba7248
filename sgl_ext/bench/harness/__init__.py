"""Load, samples and reports that the benchmarks share."""
