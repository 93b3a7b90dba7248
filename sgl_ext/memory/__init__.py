"""Memory of the KV pool, allocation of its blocks, and copies between memory, devices and files."""
