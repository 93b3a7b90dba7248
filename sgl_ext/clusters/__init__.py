"""Contexts on SSDs, over which requests decode by co-activated KV entries (Swarm)."""
