"""Hooks on one scheduler step: admission, the budget of prefilled tokens, and the forward."""
