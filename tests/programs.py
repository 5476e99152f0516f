"""The table of programs, each with parameters, the shapes of its inputs, and the batches that it fits.

A new program is one line of `PROGRAMS`: values, gradients and padding are then tested for it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cavs
from cavs import vertex_programs as vp
from tests.vertex_functions import (
    COPYING,
    E,
    H,
    attention,
    chained_products,
    children_counted,
    constants,
    control_flow,
    copying,
    custom_derivatives,
    eager_state,
    edge_attention,
    edge_messages,
    edges_in_push,
    embedding,
    gathered_twice,
    integer_reductions,
    lazy_push,
    matrix_on_the_left,
    matrix_states,
    mixed_dtypes,
    named,
    no_inputs,
    one_kind,
    own_values,
    running_sum,
    swap_back,
    twin_states,
)

ROW = jax.ShapeDtypeStruct((E,), jnp.float64)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A vertex function with parameters, the shapes of one vertex's inputs, and the batches that it fits."""

    function: cavs.VertexFunction
    params: Any
    rows: Any
    batches: tuple[str, ...]
    tolerance: float = 1.0  # times that of float64: for programs with parts in float32
    edges: Any = None  # the shapes of one edge's row

    def inputs(self, num_vertices: int, seed: int = 0) -> Any:
        """Random inputs, one row per vertex; integers are 0 .. 3."""
        return _random(self.rows, num_vertices, seed)

    def edges_of(self, num_edges: int) -> Any:
        """Random edges, one row per edge."""
        return _random(self.edges, num_edges, 9)


def _random(one: Any, count: int, seed: int) -> Any:
    rng = np.random.default_rng(seed)

    def rows(s: Any) -> np.ndarray:
        shape = (count, *s.shape)
        if jnp.issubdtype(s.dtype, jnp.integer):
            return rng.integers(0, 4, shape).astype(s.dtype)
        return rng.standard_normal(shape).astype(s.dtype)

    return jax.tree.map(rows, one)


def _params_of(program: Any) -> Any:
    """Draws parameters of a ready program, all of them random, and compiles nothing."""
    rng = np.random.default_rng(2)
    shapes = jax.eval_shape(program.init, jax.random.key(1))
    return jax.tree.map(lambda s: 0.5 * rng.standard_normal(s.shape).astype(s.dtype), shapes)


def _ready(program: Any, *batches: str, rows: Any = ROW) -> Program:
    return Program(program.vertex_function(), _params_of(program), rows, batches)


def _made(
    fn: Any,
    state: Any,
    arity: int,
    shapes: dict[str, tuple[int, ...]],
    rows: Any,
    *batches: str,
    optimizations: cavs.Optimizations | None = None,
    **kwargs: Any,
) -> Program:
    rng = np.random.default_rng(2)
    params = {name: 0.5 * rng.standard_normal(shape) for name, shape in shapes.items()}
    function = cavs.VertexFunction(fn, state=state, arity=arity, optimizations=optimizations)
    return Program(function, params, rows, batches, **kwargs)


def _lstm_like(**kwargs: Any) -> Program:
    program = vp.LSTM(H, E, jnp.float64)
    function = cavs.VertexFunction(program, state={"c": (H,), "h": (H,)}, arity=1, optimizations=cavs.Optimizations(**kwargs))
    return Program(function, _params_of(program), ROW, ("chains",))


_F64 = jnp.float64
_W = {"w": (E, H), "u": (H, H)}
_TWO = {"c": (H,), "h": (H,)}
_scalar = jax.ShapeDtypeStruct((), _F64)
_int = jax.ShapeDtypeStruct((), jnp.int32)
_EDGE = {"x": jax.ShapeDtypeStruct((4,), _F64), "w": _scalar}
_EDGES = _W | {"e": (4, H), "q": (4,)}

PROGRAMS: dict[str, Program] = {
    "BinaryTreeLSTM": _ready(vp.BinaryTreeLSTM(H, E, dtype=_F64), "binary"),
    "BinaryTreeLSTM, inputs everywhere": _ready(vp.BinaryTreeLSTM(H, E, leaf_inputs_only=False, dtype=_F64), "binary"),
    "GlyphTreeLSTM": _ready(vp.GlyphTreeLSTM(H, 4, dtype=_F64, channels=2), "binary", rows=jax.ShapeDtypeStruct((4, 4), _F64)),
    "NaryTreeLSTM": _ready(vp.NaryTreeLSTM(H, E, dtype=_F64), "binary"),
    "NaryTreeLSTM of 3": _ready(vp.NaryTreeLSTM(H, E, arity=3, dtype=_F64), "binary"),
    "ChildSumTreeLSTM": _ready(vp.ChildSumTreeLSTM(H, E, dtype=_F64), "wide"),
    "TreeFC": _ready(vp.TreeFC(H, _F64), "binary", rows=jax.ShapeDtypeStruct((H,), _F64)),
    "ElmanRNN": _ready(vp.ElmanRNN(H, E, _F64), "chains", "one vertex"),
    "LSTM": _ready(vp.LSTM(H, E, _F64), "chains", "very long chain"),
    "GRU": _ready(vp.GRU(H, E, _F64), "long chain"),
    "RvNN": _ready(vp.RvNN(H, E, _F64), "leaf and inner"),
    "TDRNN": _ready(vp.TDRNN(H, _F64), "pyramids", rows=jax.ShapeDtypeStruct((H,), _F64)),
    "TDLSTM": _ready(vp.TDLSTM(H, _F64), "pyramids", rows=jax.ShapeDtypeStruct((H,), _F64)),
    "ResetLSTM": _ready(vp.ResetLSTM(H, E, _F64), "chains", rows={"x": ROW, "reset": _int}),
    "LatticeLSTM": _ready(vp.LatticeLSTM(H, E, _F64), "lattices"),
    "DAGNN": _ready(vp.DAGNN(H, E, _F64), "wide"),
    "EncoderDecoder": _ready(
        vp.EncoderDecoder(H, E, _F64),
        "sentence pairs",
        rows={"x": ROW, "c": jax.ShapeDtypeStruct((H,), _F64), "h": jax.ShapeDtypeStruct((H,), _F64)},
    ),
    "named": _made(named, (H,), 2, _W, {"word": ROW, "bias": _scalar}, "binary"),
    "lazy push": _made(lazy_push, (H,), 2, _W | {"p": (H, H)}, ROW, "binary"),
    "attention": _made(attention, {"h": (H,), "n": (2,)}, 0, _W | {"k": (H, H), "v": (H, H)}, ROW, "wide"),
    "children counted": _made(children_counted, (H,), 0, _W | {"b": (H,)}, ROW, "wide"),
    "own values": _made(own_values, (H,), 0, _W, ROW, "wide"),
    "own values without eager": _made(own_values, (H,), 0, _W, ROW, "wide", optimizations=cavs.Optimizations(eager=False)),
    "edges in push": _made(edges_in_push, (H,), 0, _W, ROW, "wide"),
    "eager state": _made(
        eager_state, {"h": (H,), "eager": (H,), "x": (E,), "constant": (H,), "bias": (H,)}, 2, _W | {"b": (H,)}, ROW, "binary"
    ),
    "mixed dtypes": _made(
        mixed_dtypes,
        {
            "h": jax.ShapeDtypeStruct((H,), _F64),
            "half": jax.ShapeDtypeStruct((H,), jnp.float32),
            "depth": _int,
            "odd": jax.ShapeDtypeStruct((), bool),
        },
        2,
        _W,
        {"x": ROW, "flag": jax.ShapeDtypeStruct((), bool)},
        "binary",
        tolerance=1e6,
    ),
    "integer reductions": _made(
        integer_reductions, {"height": _int, "paths": _int, "h": (H,)}, 0, {"w": (E, H), "gain": ()}, ROW, "wide"
    ),
    "matrix on the left": _made(matrix_on_the_left, (H,), 2, {"w": (H, E), "u": (H, H), "v": (H, H, H)}, ROW, "binary"),
    "matrix states": _made(
        matrix_states,
        {"matrix": (H, H), "vector": (H,)},
        2,
        {"w": (E, H * H), "m": (H, H), "n": (H, H), "u": (2 * H, H), "b": (H,)},
        ROW,
        "binary",
    ),
    "custom derivatives": _made(custom_derivatives, (H,), 2, _W | {"gain": (H,)}, ROW, "binary"),
    "chained products": _made(chained_products, (H,), 1, _W | {"v": (H, 4)}, ROW, "long chain"),
    "constants": _made(constants, (H,), 2, {"w": (E, H), "gain": (), "unused": (3, 2)}, ROW, "binary"),
    "no inputs": _made(no_inputs, (H,), 0, {"u": (H, H), "b": (H,)}, None, "wide", "very wide"),
    "embedding": _made(
        embedding, (H,), 1, {"table": (4, E), "w": (E, H), "u": (4, H, H)}, {"word": _int, "relation": _int}, "chains"
    ),
    "control flow": _made(control_flow, (H,), 1, {"w": (E, H), "u": (3, H, H)}, ROW, "chains"),
    "three kinds": _made(
        {"word": one_kind(jnp.tanh, "word"), "phrase": one_kind(jax.nn.sigmoid, "phrase"), "root": one_kind(jnp.sin, "root")},
        (H,),
        2,
        {"w": (E, H), "word": (H, H), "phrase": (H, H), "root": (H, H)},
        ROW,
        "three kinds",
    ),
    "twin states": _made(twin_states, {"a": (H,), "b": (H,)}, 2, _W, ROW, "binary"),
    "gathered twice": _made(gathered_twice, {"c": (H,), "h": (H,)}, 2, _W, ROW, "binary"),
    **{step.__name__: _made(copying(step, "by number"), _TWO, 2, _W, ROW, "binary") for step in COPYING},
    **{f"{step.__name__} of all": _made(copying(step), _TWO, 0, _W, ROW, "wide") for step in (running_sum, swap_back)},
    "copying kinds": _made(
        {kind: copying(step, "by number") for kind, step in zip(("word", "phrase", "root"), COPYING[1:], strict=False)},
        _TWO,
        2,
        _W,
        ROW,
        "three kinds",
    ),
    "edge messages": _made(
        edge_messages,
        (H,),
        2,
        _W | {"e": (4, H), "types": (4, H)},
        ROW,
        *("wide", "three kinds"),
        edges={"x": jax.ShapeDtypeStruct((4,), _F64), "type": _int},
    ),
    "edge attention": _made(edge_attention, (H,), 0, _EDGES, ROW, "binary", "one vertex", edges=_EDGE),
    "edge attention without eager": _made(
        edge_attention, (H,), 0, _EDGES, ROW, "lattices", optimizations=cavs.Optimizations(eager=False), edges=_EDGE
    ),
    "without fusion": _lstm_like(fusion=False),
    "without eager": _lstm_like(eager=False),
    "without lazy": _lstm_like(lazy=False),
}

# In a forest, cotangents overwrite states of some programs (`tests/test_keeping.py` checks that these are among them).
IN_FORESTS = [
    *(
        (name, "forest")
        for name in ("BinaryTreeLSTM", "BinaryTreeLSTM, inputs everywhere", "NaryTreeLSTM", "NaryTreeLSTM of 3")
    ),
    *(
        (name, "forest")
        for name in ("ChildSumTreeLSTM", "GlyphTreeLSTM", "TDLSTM", "twin states", "gathered twice", "lazy push")
    ),
    ("RvNN", "forest of leaf and inner"),
    ("three kinds", "forest of three kinds"),
    *(
        (name, "forest")
        for name in ("running_sum", "skip_connection", "swap", "swap_back", "running_sum of all", "swap_back of all")
    ),
    ("copying kinds", "forest of three kinds"),
]
CASES = [(name, batch) for name, program in PROGRAMS.items() for batch in program.batches] + IN_FORESTS

# Each ready program once, for slow tests.
READY = [(name, PROGRAMS[name].batches[0]) for name in ("BinaryTreeLSTM", "ChildSumTreeLSTM", "GRU")]
