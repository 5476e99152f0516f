"""The device operations in Pallas Mosaic GPU, for Hopper. Only a launch imports this: not every JAX has all of it."""
