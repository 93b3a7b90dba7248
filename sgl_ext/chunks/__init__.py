"""Position-independent reuse of the KV of text chunks (EPIC)."""
