"""KV memory lending between the engines of one host (SwiftCache)."""
