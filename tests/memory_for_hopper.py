"""Compiles programs for an H200, on a machine without one; run by `test_memory_late`.

Prints one line of JSON: the bytes of temporary memory of the gradient of a stack of loops (DeepSpeech 2) with `recompute`, and
of the same if all results of loops begin to exist at once; of an LSTM on engine `scan`, one chain at a time, with the bytes of
a weight; of attention inside of F, with the bytes of the matrices that one part attends to; and of a Tree-LSTM on engine
`persistent`, in rows of the hidden size for each vertex.
"""

from tests.hopper_compiler import compiled  # isort: skip

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cavs
from bench import graphs
from bench.models import speech_init, speech_loss
from bench.ours import graphs_of
from cavs import vertex_programs as vp
from cavs._jaxpr import late_zeros
from cavs._memory import plan_batch
from cavs.kernels import H200, Target
from cavs.memory import recompute


def temp(fn: Any, *args: Any) -> int:
    memory = compiled(fn, *args).memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


sizes = {"hidden": 64, "batch": 16, "length": 120, "layers": 4, "bands": 16, "channels": 2, "letters": 20}
shapes = jax.eval_shape(lambda key: speech_init(key, **sizes), jax.random.key(0))
small = recompute(speech_loss)
found = {"temp": temp(jax.grad(small), *shapes)}
late_zeros._SMALL = 1 << 62
found |= {"at_once": temp(jax.grad(recompute(speech_loss)), *shapes)}

Target.here = staticmethod(lambda: H200)
chains, lstm = cavs.from_lengths([24] * 4), vp.LSTM(256, 256)
F, params = lstm.vertex_function(), jax.eval_shape(lstm.init, jax.random.key(0))


def loss(params, batch):
    sched, x = batch
    return jnp.sum(cavs.run(F, params, sched, x, select=sched.roots, engine="scan") ** 2)


def collate(sample: Any) -> Any:
    return sample.sched, sample.sched.pad(jnp.ones((sample.graphs.num_vertices, 256)))


plan_batch.check_parts = lambda *_: None  # it would run on this machine
plan = cavs.memory.plan(loss, params, chains, parts=4, collate=collate)
found |= {"lstm": temp(jax.value_and_grad(plan.loss), params, plan.batch(chains)), "weight": 4 * 256 * 1024}


# Attention inside of F: products with vectors. Each vertex attends to a matrix of its own.
def attend(p: Any, v: cavs.Vertex) -> None:
    keys, below = v.pull(), v.gather(0) + v.gather(1)
    weights = jax.nn.softmax(jnp.tanh(keys + below @ p["query"]) @ p["score"])
    h = jnp.tanh(jnp.concatenate([below, weights @ keys]) @ p["out"])
    v.scatter(h)
    v.push(h)


F = cavs.VertexFunction(attend, state=(128,), arity=2)
params = {n: jnp.ones(shape) for n, shape in (("query", (128, 128)), ("out", (256, 128)), ("score", (128,)))}
trees = graphs_of(graphs.sst_like(np.random.default_rng(0), 16))


def matrices(sample: Any) -> Any:
    return sample.sched, sample.sched.pad(np.ones((sample.graphs.num_vertices, 50, 128), np.float32))


plan = cavs.memory.plan(loss, params, trees, parts=2, collate=matrices)
found |= {"attention": temp(jax.value_and_grad(plan.loss), params, batch := plan.batch(trees))}
found |= {"matrices": batch[1].nbytes // 2}

trees, program = graphs_of(graphs.sst_like(np.random.default_rng(0), 1024)), vp.BinaryTreeLSTM(512, 512)
F, params = program.vertex_function(), jax.eval_shape(program.init, jax.random.key(0))
sched = cavs.schedule(trees, scripts=True, exact=True)


def tree_loss(params, data, x):
    sched_of = cavs.Schedule(data, sched.shape)
    return jnp.sum(cavs.run(F, params, sched_of, x, select=sched_of.roots, engine="persistent") ** 2)


x = jax.ShapeDtypeStruct((sched.shape.vertices, 512), jnp.float32)
data = jax.ShapeDtypeStruct(sched.data.shape, jnp.int32)
print(json.dumps(found | {"rows": temp(jax.value_and_grad(tree_loss), params, data, x) / x.size / 4}))
