"""The ``chunks`` power in SGLang: position-independent chunk caching (EPIC)."""
