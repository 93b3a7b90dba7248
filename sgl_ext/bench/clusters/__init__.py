"""The benchmark of contexts on SSDs."""
