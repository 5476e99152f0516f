"""Compiles programs for an H200, on a machine without one; run by `test_memory_late`.

Prints one line of JSON: the bytes of temporary memory of the gradient of a stack of loops (DeepSpeech 2) with `recompute`, and
those predicted; of an LSTM on engine `scan`, one chain at a time, with the bytes of a weight; of one with chains in two parts,
and those predicted; of attention inside of F, and those predicted; and of a Tree-LSTM on engine `persistent`, in rows of the
hidden size for each vertex.
"""

from tests.hopper_compiler import compiled  # isort: skip

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cavs
from bench import budgets, graphs
from bench.echo_cases import speech_init, speech_loss
from bench.ours import graphs_of
from cavs import vertex_programs as vp
from cavs._engines import chip
from cavs._function import products
from cavs.kernels import persistent
from cavs.memory import recompute

shapes = jax.eval_shape(lambda key: speech_init(key, hidden=64, batch=16, length=60, layers=4, bands=16), jax.random.key(0))
small = recompute(speech_loss)
memory = compiled(jax.grad(small), *shapes).memory_analysis()
assert memory is not None
found = {"temp": memory.temp_size_in_bytes, "predicted": small.plan(*shapes).peak}

jax.default_backend = lambda: "gpu"  # what is traced depends on it
persistent.supported = lambda: None
products._hopper, chip.multiprocessors = (lambda: True), (lambda: 132)
chains, lstm = cavs.from_lengths([24] * 4), vp.LSTM(256, 256)
F, params = lstm.vertex_function(), jax.eval_shape(lstm.init, jax.random.key(0))


def loss(params, batch):
    sched, x = batch
    return jnp.sum(cavs.run(F, params, sched, x, select=sched.roots, engine="scan") ** 2)


def collate(sample: Any) -> Any:
    return sample.sched, sample.sched.pad(jnp.ones((sample.graphs.num_vertices, 256)))


plan = cavs.memory.plan(loss, params, chains, parts=4, keep="fast", collate=collate)
memory = compiled(jax.value_and_grad(plan.loss), params, plan.batch(chains)).memory_analysis()
assert memory is not None
found |= {"lstm": memory.temp_size_in_bytes, "weight": 4 * 256 * 1024}

lengths = np.random.default_rng(0).integers(10, 40, 64)
chains = cavs.from_lengths(lengths.tolist())
plan = cavs.memory.plan(loss, params, chains, parts=2, keep="fast", collate=collate)
memory = compiled(jax.value_and_grad(plan.loss), params, plan.batch(chains)).memory_analysis()
assert memory is not None
found |= {"chains": memory.temp_size_in_bytes, "chains_predicted": plan.peak}

# Attention inside of F: products with vectors.
step = budgets.Step("attention", "scan", 16, 128)
plan, _ = step.plan(parts=2, keep="fast")
memory = compiled(jax.value_and_grad(plan.loss), step.params, plan.batch(step.graphs)).memory_analysis()
assert memory is not None
found |= {"attention": memory.temp_size_in_bytes, "attention_predicted": plan.peak}

trees, program = graphs_of(graphs.sst_like(np.random.default_rng(0), 1024)), vp.BinaryTreeLSTM(512, 512)
F, params = program.vertex_function(), jax.eval_shape(program.init, jax.random.key(0))
sched = cavs.schedule(trees, scripts=True, exact=True)


def tree_loss(params, data, x):
    sched_of = cavs.Schedule(data, sched.shape)
    return jnp.sum(cavs.run(F, params, sched_of, x, select=sched_of.roots, engine="persistent") ** 2)


x = jax.ShapeDtypeStruct((sched.shape.vertices, 512), jnp.float32)
data = jax.ShapeDtypeStruct(sched.data.shape, jnp.int32)
memory = compiled(jax.value_and_grad(tree_loss), params, data, x).memory_analysis()
assert memory is not None
print(json.dumps(found | {"rows": memory.temp_size_in_bytes / x.size / 4}))
