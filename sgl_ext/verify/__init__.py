"""Verification that a running server's answers do not depend on where its KV comes from."""
