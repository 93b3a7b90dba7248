"""KV beyond the device: host memory, SSDs and a distributed store, exact and checked."""
