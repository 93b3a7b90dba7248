"""Demonstrations: a power's effect on a small model on this machine, before and after."""
