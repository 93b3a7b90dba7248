"""KV pool on the slab, its allocator, and the resizing of both."""
