"""Texts and questions from real data sets for benchmarks and tests, and scores of answers."""
