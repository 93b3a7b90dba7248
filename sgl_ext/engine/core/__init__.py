"""Hooks, their dispatch and the runtime of a scheduler process, which all powers share."""
