"""The device operations in Pallas Mosaic GPU, for Hopper. Imported only by a launch: not every supported JAX can import it."""
