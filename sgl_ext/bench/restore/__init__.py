"""The benchmark of restored prefixes."""
