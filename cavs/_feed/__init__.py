"""Batches for the training loop: schedules of many batches, in worker processes too, and transfers to the device."""
