"""The ``restore`` power in SGLang: computes and loads a prefix at once (CacheFlow)."""
