"""Planning: where the KV of each span of a request comes from, and when."""
