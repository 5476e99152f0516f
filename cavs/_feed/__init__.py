"""Batches for the training loop: schedules of many batches, also in worker processes, and transfers to the device."""
