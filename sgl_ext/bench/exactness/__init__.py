"""Benchmark of exactness: answers under mixed load, compared with those of stock SGLang."""
