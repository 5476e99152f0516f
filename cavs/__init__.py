"""Cavs: dynamic neural nets in JAX. One static vertex function, any graph.

The core: `VertexFunction` and `Vertex` (what one vertex computes), `Graphs` and `read`, `read_trees`, `from_parents`,
`from_lengths`, `from_edges` (the graphs), `schedule` and `Schedule` (a batch of them), `run` and `readout` (forward, and under
`jax.grad` backward), `interpret` (the same, vertex by vertex), `explain` (how F was split, and which engine runs it),
`Optimizations` and `concurrent_jit`. `conv` and `explain_conv` are for convolutional parts of a net.

The namespaces: `cavs.data`, `cavs.io`, `cavs.debug`, `cavs.interop`, `cavs.memory`, `cavs.vertex_programs` (ready models), and
`cavs.recipes` (whole programs, which need optax, rich and matplotlib).
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cavs import (
        data as data,
        debug as debug,
        interop as interop,
        io as io,
        memory as memory,
        recipes as recipes,
        vertex_programs as vertex_programs,
    )
    from cavs._convolution.conv import conv as conv, explain_conv as explain_conv
    from cavs._debug.interpret import interpret as interpret
    from cavs._function.vertex import Optimizations as Optimizations, Vertex as Vertex, VertexFunction as VertexFunction
    from cavs._graphs.converters import from_edges as from_edges, from_lengths as from_lengths, from_parents as from_parents
    from cavs._graphs.graphs import Graphs as Graphs
    from cavs._readers import read as read
    from cavs._readers.trees import read_trees as read_trees
    from cavs._step.concurrent_jit import concurrent_jit as concurrent_jit
    from cavs._run.explain import explain as explain
    from cavs._run.readout import readout as readout
    from cavs._run.run import run as run
    from cavs._run.tune import tune as tune
    from cavs._schedule.schedule import Schedule as Schedule
    from cavs._schedule.scheduler import schedule as schedule

__version__ = "0.1.0"

# Where each public name is defined; "" for a namespace. A name is imported when it is first used, so that `cavs --help` does
# not wait for JAX. Keep this table and the imports above, which type checkers read, the same (`tests/test_packaging.py`).
_DEFINED_IN = {
    "Graphs": "_graphs.graphs",
    "Optimizations": "_function.vertex",
    "Schedule": "_schedule.schedule",
    "Vertex": "_function.vertex",
    "VertexFunction": "_function.vertex",
    "concurrent_jit": "_step.concurrent_jit",
    "conv": "_convolution.conv",
    "explain": "_run.explain",
    "explain_conv": "_convolution.conv",
    "from_edges": "_graphs.converters",
    "from_lengths": "_graphs.converters",
    "from_parents": "_graphs.converters",
    "interpret": "_debug.interpret",
    "read": "_readers",
    "read_trees": "_readers.trees",
    "readout": "_run.readout",
    "run": "_run.run",
    "schedule": "_schedule.scheduler",
    "tune": "_run.tune",
    **dict.fromkeys(("data", "debug", "interop", "io", "memory", "recipes", "vertex_programs"), ""),
}

__all__ = sorted(_DEFINED_IN)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _DEFINED_IN:
        raise AttributeError(f"module 'cavs' has no attribute {name!r}")
    module = _DEFINED_IN[name]
    value = getattr(importlib.import_module(f"cavs.{module}"), name) if module else importlib.import_module(f"cavs.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
