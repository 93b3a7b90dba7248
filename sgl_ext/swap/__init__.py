"""Swapping of preempted requests to host memory and back, instead of recomputation."""
