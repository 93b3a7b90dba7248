"""The harness of exactness: its script, its comparison, and its run against the worst that is known."""
