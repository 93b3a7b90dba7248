"""The ``tiers`` power in SGLang: KV beyond the device, as SGLang's external cache."""
