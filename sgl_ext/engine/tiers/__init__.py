"""The ``tiers`` power in SGLang: KV beyond the device as its external cache."""
