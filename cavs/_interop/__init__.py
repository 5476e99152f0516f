"""Bridges to what users have already: cells, PyTorch's weights and edge arrays, safetensors, `jax.export`.

No file here imports another system; safetensors and flatbuffers (which `jax.export` wants) only where they are used.
"""
