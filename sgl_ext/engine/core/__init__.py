"""What every power shares: hooks, their dispatch, the runtime of a scheduler process."""
