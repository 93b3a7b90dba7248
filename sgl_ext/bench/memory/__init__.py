"""The benchmark of the slab, its allocator and the transfer engine."""
