"""The KV pool on the slab, its allocator, and how both are resized."""
