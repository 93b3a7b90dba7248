"""The benchmark of engines that lend each other memory."""
