"""A simulated run: engines that only take time, in real processes, over the real wire."""
