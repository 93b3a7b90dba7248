"""The ``clusters`` power in SGLang: decoding over contexts on SSDs (Swarm)."""
