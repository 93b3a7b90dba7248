"""Engines of one host lend each other KV memory (SwiftCache)."""
