"""The engines that run the levels: loops on any device, or a kernel of its own, and the choice between them."""
