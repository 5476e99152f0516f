"""The scheduler: a batch of graphs becomes levels, tasks and one vector of integers, and a picture of them."""
