"""Batches on their way to the device: schedules made in other processes, and transfers made ahead or together."""
