"""The launcher's part of a start: arguments, checks, and the processes that it waits for."""
