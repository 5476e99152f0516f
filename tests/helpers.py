"""THE tables: vertex programs (`PROGRAMS`) and odd graphs (`GRAPHS`, `BATCHES`), and the per-vertex loop as truth.

A new program is one line of `PROGRAMS`: values, gradients and padding are then tested for it. Small sizes: hidden 5,
inputs 3, so that no two axes agree by accident.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cavs
from cavs import vertex_programs as vp

H, E = 5, 3
ROW = jax.ShapeDtypeStruct((E,), jnp.float64)


# ---- graphs ----


def chain(length: int) -> cavs.Graphs:
    """One chain; each vertex depends on the one before."""
    return cavs.Graphs.build([length], [0] + [1] * (length - 1), np.arange(length - 1))


def star(children: int) -> cavs.Graphs:
    """One vertex over `children` leaves, numbered first."""
    return cavs.Graphs.build([children + 1], [children] + [0] * children, np.arange(1, children + 1))


def from_children(children: Sequence[Sequence[int]]) -> cavs.Graphs:
    """One graph from each vertex's list of children."""
    return cavs.Graphs.build([len(children)], [len(c) for c in children], [k for c in children for k in c])


def random_binary_tree(leaves: int, seed: int) -> cavs.Graphs:
    """A binary tree of random shape, its vertices numbered at random."""
    rng = np.random.default_rng(seed)
    children: list[list[int]] = [[] for _ in range(leaves)]
    roots = list(range(leaves))
    while len(roots) > 1:
        left, right = (roots.pop(int(rng.integers(len(roots)))) for _ in range(2))
        roots.append(len(children))
        children.append([left, right])
    return renumbered(children, rng.permutation(len(children)))


def random_dag(vertices: int, fan_ins: Sequence[int], seed: int) -> cavs.Graphs:
    """A directed acyclic graph, children drawn with repetition, its vertices numbered at random."""
    rng = np.random.default_rng(seed)
    children = [list(rng.integers(0, r, rng.choice(fan_ins))) if r else [] for r in range(vertices)]
    return renumbered(children, rng.permutation(vertices))


def renumbered(children: Sequence[Sequence[int]], number: np.ndarray) -> cavs.Graphs:
    """One graph whose r-th vertex of `children` gets the number `number[r]`."""
    out: list[list[int]] = [[] for _ in children]
    for r, kids in enumerate(children):
        out[number[r]] = [int(number[k]) for k in kids]
    return from_children(out)


def joined(graphs: Sequence[cavs.Graphs]) -> cavs.Graphs:
    """All graphs in one batch."""
    return functools.reduce(lambda a, b: a + b, graphs)


def with_kinds(graphs: cavs.Graphs, names: tuple[str, ...], seed: int = 0) -> cavs.Graphs:
    """The same graphs with random kinds."""
    kind = np.random.default_rng(seed).integers(0, len(names), graphs.num_vertices).astype(np.int32)
    return dataclasses.replace(graphs, kind=kind, kind_names=names)


GRAPHS = {
    "one vertex": from_children([[]]),
    "two of one vertex": joined([from_children([[]])] * 2),
    "chain of 60": chain(60),
    "chain of 500": chain(500),
    "star of 40": star(40),
    "star of 300": star(300),
    # Several roots, a vertex with one child, the same child twice, children of unlike heights, several parents.
    "shared children": from_children([[], [], [0, 1], [0, 0], [2, 3], [2], [4, 5], [4], [7, 0]]),
    "wide DAG": random_dag(15, (0, 1, 2, 4), seed=1),
    "trees": joined([random_binary_tree(n, seed=n) for n in (2, 9, 5, 1, 12)]),
}

BATCHES = {
    "chains": joined([chain(n) for n in (1, 17, 1, 6, 2)]),
    "long chain": GRAPHS["chain of 60"],
    "very long chain": GRAPHS["chain of 500"],
    "binary": joined([GRAPHS[g] for g in ("one vertex", "trees", "shared children", "two of one vertex")] + [chain(6)]),
    "one vertex": GRAPHS["one vertex"],
    "wide": joined([GRAPHS[g] for g in ("star of 40", "one vertex", "shared children", "wide DAG")] + [chain(4)]),
    "very wide": joined([GRAPHS["star of 300"], chain(3)]),
}
BATCHES["leaf and inner"] = vp.RvNN.add_kinds(BATCHES["binary"])
BATCHES["three kinds"] = with_kinds(BATCHES["binary"], ("word", "phrase", "root"))
BATCHES["pyramids"] = vp.TDRNN.graphs([1, 5, 2])
# One character; words that share first and last characters, a word of two vertices; no words.
BATCHES["lattices"] = vp.LatticeLSTM.graphs([1, 7, 3], [[], [(0, 2), (0, 3), (2, 3), (1, 6), (3, 6), (3, 6)], []])
BATCHES["sentence pairs"] = vp.EncoderDecoder.graphs([1, 5, 3], [3, 4, 1])[1]


# ---- programs ----


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A vertex function with parameters, the shapes of one vertex's inputs, and the batches that it fits."""

    function: cavs.VertexFunction
    params: Any
    rows: Any
    batches: tuple[str, ...]
    tolerance: float = 1.0  # times that of float64: for programs with parts in float32

    def inputs(self, num_vertices: int, seed: int = 0) -> Any:
        """Random inputs, one row per vertex; integers are 0 .. 3."""
        rng = np.random.default_rng(seed)

        def rows(s: Any) -> np.ndarray:
            shape = (num_vertices, *s.shape)
            if jnp.issubdtype(s.dtype, jnp.integer):
                return rng.integers(0, 4, shape).astype(s.dtype)
            return rng.standard_normal(shape).astype(s.dtype)

        return jax.tree.map(rows, self.rows)


def _ready(program: Any, *batches: str, rows: Any = ROW) -> Program:
    return Program(program.vertex_function(), program.init(jax.random.key(1)), rows, batches)


def _made(
    fn: Any, state: Any, arity: int, shapes: dict[str, tuple[int, ...]], rows: Any, *batches: str, **kwargs: Any
) -> Program:
    rng = np.random.default_rng(2)
    params = {name: 0.5 * rng.standard_normal(shape) for name, shape in shapes.items()}
    return Program(cavs.VertexFunction(fn, state=state, arity=arity), params, rows, batches, **kwargs)


def named(params: Any, v: cavs.Vertex) -> None:
    """Pulls and pushes by name, a scalar input, a pushed pytree beside a pushed state."""
    h = jnp.tanh(v.gather(0) @ params["u"] - v.gather(1) + v.pull("word") @ params["w"] + v.pull("bias"))
    v.scatter(h)
    v.push(h, "h")
    v.push({"score": h @ h, "pair": (h[:2], v.pull("bias"))}, "readout")


def lazy_push(params: Any, v: cavs.Vertex) -> None:
    """Pushes no state: a lazy value that reads gathered states, eager values and recurrent values that are no states."""
    left, right = v.gather(0), v.gather(1)
    eager = jnp.sin(v.pull() @ params["w"])
    gate = jax.nn.sigmoid((left + right) @ params["u"] + eager)
    v.scatter(gate * left + (1 - gate) * eager)
    v.push(jnp.tanh((left * right) @ params["p"] + gate) * eager)


def attention(params: Any, v: cavs.Vertex) -> None:
    """All four reductions over any number of children, with a query of the vertex's own."""
    query = v.pull() @ params["w"]
    weighted = v.gather_all(lambda s: (query @ jnp.tanh(s["h"] @ params["k"]), s["h"] @ params["v"]), reduce="softmax")
    top = v.gather_all(lambda s: s["h"] * query, reduce="max")
    mean = v.gather_all(lambda s: {"h": s["h"], "n": s["n"]}, reduce="mean")
    h = jnp.tanh(weighted + top @ params["u"] + mean["h"] + query)
    v.scatter({"h": h, "n": v.gather_all(lambda s: s["n"]) / (1.0 + v.num_children()) + 0.1 * h[:2]})
    v.push({"h": h, "mean": mean["n"]})


def edges_in_push(params: Any, v: cavs.Vertex) -> None:
    """Scatters an eager value alone; the children are read for the push, as in one layer of a graph network."""
    message = jnp.tanh(v.pull() @ params["w"])
    v.scatter(message)
    v.push(v.gather_all(lambda m: jax.nn.relu(m @ params["u"] + message), reduce="mean"))


def eager_state(params: Any, v: cavs.Vertex) -> None:
    """One state leaf is eager, one recurrent, one an input as it is, one a constant, one a parameter."""
    kid = v.gather(1)
    eager = jnp.tanh(v.pull() @ params["w"])
    h = jnp.tanh(kid["h"] @ params["u"] + kid["eager"] * v.gather(0)["h"] + kid["constant"] + kid["bias"] - eager)
    v.scatter({"h": h, "eager": eager, "x": v.pull(), "constant": jnp.full(H, 0.5), "bias": params["b"]})
    v.push({"h": h, "x": kid["x"]})


def mixed_dtypes(params: Any, v: cavs.Vertex) -> None:
    """States and inputs in float64, float32, integers and booleans."""
    left, right = v.gather(0), v.gather(1)
    depth = jnp.where(v.is_leaf(), 0, 1 + jnp.maximum(left["depth"], right["depth"]))
    h = jnp.tanh((left["h"] + right["half"]) @ params["u"] + v.pull("x") @ params["w"] + 0.1 * depth)
    odd = (depth % 2 == 1) ^ left["odd"] ^ v.pull("flag")
    half = jnp.where(odd, h, 2 * h).astype(jnp.float32)
    v.scatter({"h": h, "half": half, "depth": depth.astype(jnp.int32), "odd": odd})
    v.push({"h": h, "depth": depth, "odd": odd, "half": half})


def integer_reductions(params: Any, v: cavs.Vertex) -> None:
    """The height and the number of paths, by `gather_all` over integers."""
    height = jnp.int32(0) if v.is_leaf() else 1 + v.gather_all(lambda s: s["height"], reduce="max")
    paths = jnp.int32(1) if v.is_leaf() else v.gather_all(lambda s: s["paths"])
    h = jnp.tanh(v.gather_all(lambda s: s["h"]) * params["gain"] + v.pull() @ params["w"] + height)
    v.scatter({"height": height, "paths": paths, "h": h})
    v.push({"height": height, "paths": paths, "h": h})


def matrix_on_the_left(params: Any, v: cavs.Vertex) -> None:
    """W x, and the tensor layer of Socher et al., 2013: h_1^T V h_2."""
    left, right = v.gather(0), v.gather(1)
    tensor = jnp.einsum("i,ijk,k->j", left, params["v"], right)
    h = jnp.tanh(params["u"] @ left + params["u"].T @ right + params["w"] @ v.pull() + tensor)
    v.scatter(h)
    v.push(h)


def matrix_states(params: Any, v: cavs.Vertex) -> None:
    """A matrix and a vector a vertex (MV-RNN, Socher et al., 2012): products between rows, and of matrices with parameters."""
    left, right = v.gather(0), v.gather(1)
    own = (
        (v.pull() @ params["w"]).reshape(H, H) if v.is_leaf() else params["m"] @ left["matrix"] + right["matrix"] @ params["n"]
    )
    vector = jnp.tanh(
        jnp.concatenate([right["matrix"] @ left["vector"], left["matrix"] @ right["vector"]]) @ params["u"] + params["b"]
    )
    v.scatter({"matrix": jnp.tanh(own), "vector": vector})
    v.push(vector)


@jax.custom_vjp
def clipped_identity(x: Any) -> Any:
    """x, whose cotangents are clipped."""
    return x


clipped_identity.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -0.3, 0.3),))


def custom_derivatives(params: Any, v: cavs.Vertex) -> None:
    """Functions with derivatives of their own, cusps, row reductions, and a value whose gradient is stopped."""
    z, h = _norms(v.gather(0), v.gather(1), v.pull(), params)
    v.scatter(h)
    v.push(jnp.concatenate([h, z[jnp.argsort(h)[:2]], jnp.max(z)[None]]))


@jax.jit
def _norms(left: Any, right: Any, x: Any, params: Any) -> Any:
    z = jax.nn.relu(left @ params["u"] + x @ params["w"] + 0.3)
    z = jax.nn.silu(z) + jax.nn.gelu(right) + jax.lax.stop_gradient(z) * 0.1
    z = (z - z.mean()) / jnp.sqrt(z.var() + 1e-3) * params["gain"]  # layer norm
    h = jax.nn.softplus(z) - jax.nn.logsumexp(z) + jax.nn.softmax(z) + jnp.sort(z) + jnp.cumsum(z)
    return z, clipped_identity(h) / 8


def chained_products(params: Any, v: cavs.Vertex) -> None:
    """Products that wait for each other, residuals, and a weight that is used three times."""
    s = v.gather(0)
    r = jax.nn.sigmoid(s @ params["u"] + v.pull() @ params["w"])
    a = jnp.tanh((r * s) @ params["u"])  # the reset gate as in Cho et al., 2014
    b = jnp.tanh(a @ params["v"]) @ params["v"].T
    h = jnp.tanh(s + b @ params["u"] + r)
    v.scatter(h)
    v.push(h + a)


MASK = np.array([1.0, 0.0, -1.0, 0.5, 2.0])


def constants(params: Any, v: cavs.Vertex) -> None:
    """Closes over an array, has parameters that it does not read and one that is a scalar, asks for its children."""
    h = jnp.tanh(v.gather(0) * MASK * params["gain"] + v.pull() @ params["w"] * v.has_child(1))
    h = jnp.where(v.has_child(0), h, jnp.float64(0.25)) + 0.01 * v.num_children()
    v.scatter(h)
    v.push(h)


def no_inputs(params: Any, v: cavs.Vertex) -> None:
    """Pulls nothing."""
    h = jnp.tanh(v.gather_all(lambda s: s @ params["u"]) + params["b"])
    v.scatter(h)
    v.push(h)


def embedding(params: Any, v: cavs.Vertex) -> None:
    """Looks its word up in a table of parameters and picks one of several matrices; sums over all words for the push."""
    x = params["table"][v.pull("word")]
    matrix = params["u"][v.pull("relation")]
    h = jnp.tanh(x @ params["w"] + v.gather(0) @ matrix)
    v.scatter(h)
    v.push(jax.nn.log_softmax(params["table"] @ h[:E]))


def control_flow(params: Any, v: cavs.Vertex) -> None:
    """Loops and conditions of `jax.lax` inside F."""
    h = _loops(v.gather(0), v.pull(), params)
    v.scatter(h)
    v.push(h)


@jax.jit
def _loops(s: Any, x: Any, params: Any) -> Any:
    h, total = jax.lax.scan(lambda h, u: (jnp.tanh(h @ u + s), h.sum()), x @ params["w"], params["u"])
    h = jax.lax.cond(x[0] > 0, lambda h: h * 0.5, lambda h: jnp.sin(h) + s, h)
    return jax.lax.fori_loop(0, 3, lambda i, h: h + 0.1 * i * jnp.tanh(h), h) + total.mean()


def _kind(activation: Callable[[Any], Any], name: str) -> Any:
    def fn(params: Any, v: cavs.Vertex) -> None:
        kids = v.gather(0) + v.gather(1) if name != "word" else v.gather(1)
        h = activation(kids @ params[name] + (v.pull() @ params["w"] if name != "root" else 0.1))
        v.scatter(h)
        v.push(h if name != "phrase" else 2 * h)

    return fn


def _lstm_like(**kwargs: Any) -> Program:
    program = vp.LSTM(H, E, jnp.float64)
    function = cavs.VertexFunction(program, state={"c": (H,), "h": (H,)}, arity=1, optimizations=cavs.Optimizations(**kwargs))
    return Program(function, program.init(jax.random.key(1)), ROW, ("chains",))


_F64 = jnp.float64
_W = {"w": (E, H), "u": (H, H)}
_scalar = jax.ShapeDtypeStruct((), _F64)
_int = jax.ShapeDtypeStruct((), jnp.int32)

PROGRAMS: dict[str, Program] = {
    "BinaryTreeLSTM": _ready(vp.BinaryTreeLSTM(H, E, dtype=_F64), "binary"),
    "BinaryTreeLSTM, inputs everywhere": _ready(vp.BinaryTreeLSTM(H, E, leaf_inputs_only=False, dtype=_F64), "binary"),
    "NaryTreeLSTM": _ready(vp.NaryTreeLSTM(H, E, dtype=_F64), "binary"),
    "NaryTreeLSTM of 3": _ready(vp.NaryTreeLSTM(H, E, arity=3, dtype=_F64), "binary"),
    "ChildSumTreeLSTM": _ready(vp.ChildSumTreeLSTM(H, E, dtype=_F64), "wide"),
    "TreeFC": _ready(vp.TreeFC(H, _F64), "binary", rows=jax.ShapeDtypeStruct((H,), _F64)),
    "ElmanRNN": _ready(vp.ElmanRNN(H, E, _F64), "chains", "one vertex", "very long chain"),
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
        {"word": _kind(jnp.tanh, "word"), "phrase": _kind(jax.nn.sigmoid, "phrase"), "root": _kind(jnp.sin, "root")},
        (H,),
        2,
        {"w": (E, H), "word": (H, H), "phrase": (H, H), "root": (H, H)},
        ROW,
        "three kinds",
    ),
    "without fusion": _lstm_like(fusion=False),
    "without eager": _lstm_like(eager=False),
    "without lazy": _lstm_like(lazy=False),
}

CASES = [(name, batch) for name, program in PROGRAMS.items() for batch in program.batches]

# Ready programs once each, for what is slow.
READY = [(name, PROGRAMS[name].batches[0]) for name in ("BinaryTreeLSTM", "ChildSumTreeLSTM", "GRU")]


# ---- truth ----


@functools.cache
def batch_inputs(name: str, batch: str) -> Any:
    """The inputs of a case, exactly one row per vertex."""
    return PROGRAMS[name].inputs(BATCHES[batch].num_vertices)


@functools.cache
def sched(batch: str) -> cavs.Schedule:
    """The schedule of a batch."""
    return cavs.schedule(BATCHES[batch])


def weights(pushes: Any, rows: int) -> Any:
    """Random weights of the first `rows` rows of every float push, zero beyond: the cotangents of the tests' loss."""

    def like(x: Any) -> Any:
        w = np.random.default_rng(x.size // x.shape[0]).standard_normal((rows, *x.shape[1:]))
        return np.concatenate([w, np.zeros((x.shape[0] - rows, *x.shape[1:]))])

    return jax.tree.map(lambda x: like(x) if jnp.issubdtype(x.dtype, jnp.floating) else None, pushes)


def loss(pushes: Any, rows: int) -> Any:
    """A scalar on which every float push acts with weights of its own."""
    leaves = zip(jax.tree.leaves(pushes), jax.tree.leaves(weights(pushes, rows), is_leaf=lambda w: w is None), strict=True)
    return sum((x * w).sum() for x, w in leaves if w is not None)


@functools.cache
def truth(name: str, batch: str) -> tuple[Any, Any]:
    """Pushes, and the gradients of `loss` with respect to (params, inputs), by `cavs.interpret` and `jax.grad`."""
    program, graphs = PROGRAMS[name], BATCHES[batch]

    def f(params: Any, inputs: Any) -> Any:
        pushes = cavs.interpret(program.function, params, graphs, inputs)
        return loss(pushes, graphs.num_vertices), pushes

    inputs = jax.tree.map(jnp.asarray, batch_inputs(name, batch))
    params = jax.tree.map(jnp.asarray, program.params)
    grads, pushes = jax.grad(f, argnums=(0, 1), has_aux=True, allow_int=True)(params, inputs)
    return pushes, grads


@functools.cache
def jitted(name: str) -> Any:
    """(params, sched, padded inputs, vertices) -> (gradients, pushes) of a program, compiled; for all its batches."""
    function = PROGRAMS[name].function

    def f(params: Any, inputs: Any, sched: cavs.Schedule, rows: int) -> Any:
        pushes = cavs.run(function, params, sched, inputs)
        return loss(pushes, rows), pushes

    grad = jax.grad(f, argnums=(0, 1), has_aux=True, allow_int=True)
    return jax.jit(lambda params, sched, inputs, rows: grad(params, inputs, sched, rows), static_argnums=3)


def assert_close(got: Any, want: Any, tolerance: float) -> None:
    """Every leaf equal to `tolerance`, absolute or relative; float0 gradients of integers are skipped."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, (
            f"{jax.tree_util.keystr(path)}: {a.shape} {a.dtype}, {b.shape} {b.dtype}"
        )
        if a.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=jax.tree_util.keystr(path))
