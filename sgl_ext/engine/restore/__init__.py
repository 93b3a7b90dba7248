"""The ``restore`` power in SGLang: a prefix is computed and loaded at once (CacheFlow)."""
