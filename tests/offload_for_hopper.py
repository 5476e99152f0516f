"""Compiles gradients with values on the host for an H200, on a machine without one; run by `test_memory_offload`.

Prints one line of JSON: for layers and for a loop, with values kept on the device and on the host, the bytes of temporary
memory of both, and for each copy how many kernels are scheduled between its start and its end.
"""

from tests.hopper_compiler import compiled  # isort: skip

import json
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cavs._memory.fit import compiler_options
from cavs._remat.graph import with_derivative
from cavs.kernels import H200, Target
from cavs.memory import recompute

Target.here = staticmethod(lambda: H200)
SIZE = 16384


def layers(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jnp.tanh((x - x.mean(0)) @ w)
    return (x**2).mean()


def loop(ws: Any, x: Any) -> Any:
    return (lax.scan(lambda x, w: (jnp.tanh(jnp.sin(x) @ w), None), x, ws)[0] ** 2).mean()


def copies(text: str) -> list[int]:
    """The kernels between the start and the end of each copy."""
    found = []
    for computation in re.split(r"\n(?=%|ENTRY)", text):
        count, starts = 0, dict[str, int]()
        for name in re.findall(r"\n\s+(?:ROOT )?%([\w.\-]+) = ", computation):
            if re.match(r"(copy|dynamic-update-slice|dynamic-slice)-start", name):
                starts[name] = count
            elif re.match(r"(copy|dynamic-update-slice|dynamic-slice)-done", name):
                found.append(count - starts.get(name.replace("-done", "-start"), count))
            elif re.match(r"gemm|cublas|custom-call|dot|input_|loop_", name):
                count += 1
    return found


def measured(fn: Any, share: float, *shapes: Any) -> dict[str, Any]:
    search = recompute(fn).plan(*shapes)._search
    point = search.point(math.inf, host=share) if share else search.cheap()
    flat = with_derivative(search.closed, lambda diff: point.kept)
    grad = jax.grad(lambda ws, x: flat(*jax.tree.leaves((ws, x)))[0])
    program = compiled(grad, *shapes, options=compiler_options(None, host=bool(share)))
    memory = program.memory_analysis()
    assert memory is not None
    return {
        "temp": memory.temp_size_in_bytes, "on_host": memory.host_temp_size_in_bytes, "copies": copies(program.as_text() or ""),
    }  # fmt: skip


w, x = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32), jax.ShapeDtypeStruct((2 * SIZE, SIZE), jnp.float32)
found = {}
for fn, ws in ((layers, [w] * 5), (loop, jax.ShapeDtypeStruct((5, SIZE, SIZE), jnp.float32))):
    found[fn.__name__] = {"kept": measured(fn, 0, ws, x), "host": measured(fn, 1, ws, x)}
print(json.dumps(found))
