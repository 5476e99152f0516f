"""The body of a launch, traced in Pallas, and the device operations of interpret mode."""
