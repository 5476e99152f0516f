"""Compiles a stack of loops (DeepSpeech 2) for an H200, on a machine without one; run by `test_memory_late`.

Prints one line of JSON: the bytes of temporary memory of its gradient with `recompute`, and those predicted.
"""

from tests.hopper_compiler import compiled  # isort: skip

import json

import jax

from bench.echo_cases import speech_init, speech_loss
from cavs.memory import recompute

shapes = jax.eval_shape(lambda key: speech_init(key, hidden=64, batch=16, length=60, layers=4, bands=16), jax.random.key(0))
small = recompute(speech_loss)
memory = compiled(jax.grad(small), *shapes).memory_analysis()
assert memory is not None
print(json.dumps({"temp": memory.temp_size_in_bytes, "predicted": small.plan(*shapes).peak}))
