"""Preempted requests are swapped to host memory and back instead of being computed again."""
