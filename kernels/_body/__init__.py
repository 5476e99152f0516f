"""The body of a launch, traced in Pallas."""
