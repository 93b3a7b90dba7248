"""Benchmark of the ``peer`` power: engines that lend each other KV memory."""
