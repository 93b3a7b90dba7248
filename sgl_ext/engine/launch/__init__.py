"""The launcher's side of a start: arguments, checks, and the processes that it waits for."""
