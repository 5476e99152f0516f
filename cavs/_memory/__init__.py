"""Chooses which results of the forward pass a derivative keeps, under a budget of bytes."""
