"""The KV pool: its memory, and who gets which block of it."""
