"""The benchmark of linked chunks."""
