"""Decoding over contexts on SSDs, by entries that are activated together (Swarm)."""
