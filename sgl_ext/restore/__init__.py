"""Restoration of long prefixes: the front is computed while the back loads (CacheFlow)."""
