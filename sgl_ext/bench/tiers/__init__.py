"""The benchmark of KV beyond the device."""
