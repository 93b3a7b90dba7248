"""Real texts and questions for benchmarks and tests."""
