"""Mooncake's package on a machine that lacks a library of its client."""
