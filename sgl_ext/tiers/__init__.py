"""KV cache tiers below the device: host memory, local SSDs and a distributed store.

Loaded KV is bit-exact: a page from a lower tier counts only if its checksum verifies.
"""
