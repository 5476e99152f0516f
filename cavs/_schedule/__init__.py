"""The scheduler (Cavs, Algorithm 1): from a batch of graphs to levels, tasks and their integers."""
