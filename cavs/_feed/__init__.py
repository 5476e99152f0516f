"""The loader: which graphs form a batch, which padded shape it has, its schedule, and its way to the device."""
