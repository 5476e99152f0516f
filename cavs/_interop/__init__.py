"""Conversions from and to other libraries: recurrent cells, PyTorch weights, edge arrays, safetensors and `jax.export`.

No file in this room imports another framework. safetensors, and flatbuffers for `jax.export`, are imported only when used.
"""
