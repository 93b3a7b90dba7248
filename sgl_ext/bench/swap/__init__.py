"""The benchmark of preempted requests."""
