"""Vertex functions that use everything F may use: kinds of pushes and states, reductions, dtypes, derivatives, loops.

Small sizes: hidden 5, inputs 3, so that no two axes agree by accident.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cavs

H, E = 5, 3


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


def own_values(params: Any, v: cavs.Vertex) -> None:
    """Reductions over children of values of the vertex, which are equal for all children; eager values that the push reads."""
    eager = jnp.sin(v.pull() @ params["w"])
    total = v.gather_all(lambda s: s + eager) - v.gather_all(lambda s: eager @ params["u"])
    top = v.gather_all(lambda s: eager, reduce="max")
    h = jnp.tanh(total @ params["u"] + top + eager)
    v.scatter(h)
    v.push(h * eager.sum() + v.gather_all(lambda s: (eager.sum(), 2 * eager), reduce="softmax"))


def edge_messages(params: Any, v: cavs.Vertex) -> None:
    """Messages with a type and a vector of the edge; children by number beside them; means that read edges alone."""
    x = v.pull() @ params["w"]

    def message(h: Any, edge: Any) -> Any:
        return jnp.tanh(h @ params["u"] + edge["x"] @ params["e"] + x) * params["types"][edge["type"]]

    own = v.gather_all(lambda h, edge: jnp.tanh(edge["x"] @ params["e"]) / (1 + x * x), reduce="mean", edges=True)
    h = jnp.tanh(v.gather_all(message, edges=True) + own + v.gather(0) - v.gather(1) + x)
    v.scatter(h)
    v.push({"h": h, "top": v.gather_all(lambda h, edge: h * edge["x"][0], reduce="max", edges=True)})


def edge_attention(params: Any, v: cavs.Vertex) -> None:
    """Scores of edges; an eager value of edges that push and state read; all pairs of edges of a vertex."""
    x = v.pull() @ params["w"]

    def scored(h: Any, edge: Any) -> Any:
        return h @ x + edge["x"] @ params["q"], jax.nn.sigmoid(edge["x"] @ params["e"]) * h

    def pair(h: Any, edge: Any) -> Any:
        return v.gather_all(lambda other, also: jnp.tanh(other * also["w"] - h * edge["w"]), reduce="mean", edges=True)

    h = jnp.tanh(v.gather_all(scored, reduce="softmax", edges=True) @ params["u"] + v.gather_all(pair, edges=True) + x)
    v.scatter(h)
    v.push(h * v.gather_all(lambda h, edge: jax.nn.sigmoid(edge["x"] @ params["e"]) * h * edge["w"], edges=True))


def children_counted(params: Any, v: cavs.Vertex) -> None:
    """Reductions that read no child: they reduce parameters and constants, once per child."""
    count = v.gather_all(lambda s: 1.0)
    mean = v.gather_all(lambda s: params["b"], reduce="mean")
    h = jnp.tanh(v.gather_all(lambda s: params["b"]) - mean * count + mean @ params["u"] + v.pull() @ params["w"])
    v.scatter(h)
    v.push(h * v.gather_all(lambda s: params["b"], reduce="max") + count)


def twin_states(params: Any, v: cavs.Vertex) -> None:
    """Two leaves of the state are one value; a product reads the second, cheap equations read the first."""
    left, right = v.gather(0), v.gather(1)
    z = (left["b"] + right["b"]) @ params["u"] + v.pull() @ params["w"]
    h = jnp.tanh(z + jnp.sin(left["a"]) * jnp.cos(right["a"]))
    v.scatter({"a": h, "b": h})
    v.push(2 * z)


def gathered_twice(params: Any, v: cavs.Vertex) -> None:
    """Reads the same state of a child by number and by `gather_all`."""
    left = v.gather(0)
    total = v.gather_all(lambda child: jnp.sin(child["c"]))
    z = left["h"] @ params["u"] + total * jnp.cos(left["c"]) + v.pull() @ params["w"]
    v.scatter({"c": jnp.sin(z) + 0.3 * z, "h": jnp.tanh(z)})
    v.push(jnp.tanh(z))


def running_sum(h: Any, x: Any, params: Any) -> Any:
    """The state `c` of children goes on as it is, in a sum."""
    new = jnp.tanh(h["h"] @ params["u"] + x)
    return {"h": new, "c": h["c"] + new}


def delayed(h: Any, x: Any, params: Any) -> Any:
    """A child's state `h` goes on as it is, as another state."""
    return {"h": jnp.tanh(h["c"] @ params["u"] + h["c"] + x), "c": h["h"]}


def skip_connection(h: Any, x: Any, params: Any) -> Any:
    """What is computed from the children is added to the states of their children."""
    return {"c": h["h"] + jnp.tanh(h["c"] @ params["u"] + x), "h": h["c"]}


def swap(h: Any, x: Any, params: Any) -> Any:
    """Two states change places, and so do their cotangents, which are also those of two inputs of the levels."""
    return {"c": h["h"] + jnp.sin(x), "h": h["c"] + x}


def swap_back(h: Any, x: Any, params: Any) -> Any:
    """As `swap`, with the inputs in the other order."""
    new = h["c"] + x
    return {"c": h["h"] + jnp.sin(x), "h": new}


COPYING = [running_sum, delayed, skip_connection, swap, swap_back]


def copying(step: Callable[..., Any], gather: str = "all") -> Any:
    """A vertex function whose states `step` computes from a sum of states of children, `gather`ed "by number" or "all"."""

    def fn(params: Any, v: cavs.Vertex) -> None:
        h = jax.tree.map(jnp.add, v.gather(0), v.gather(1)) if gather == "by number" else v.gather_all()
        state = step(h, v.pull() @ params["w"], params)
        v.scatter(state)
        v.push(state["c"] if step is running_sum else state["h"])

    return fn


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
    """A matrix and a vector a vertex (MV-RNN, Socher et al., 2012): products between rows, and of matrices with parameters.

    The matrix `n` and the vector `b` are multiplied in one equation and added in another.
    """
    left, right = v.gather(0), v.gather(1)
    if v.is_leaf():
        own = (v.pull() @ params["w"]).reshape(H, H)
    else:
        own = params["m"] @ left["matrix"] + right["matrix"] @ params["n"] + params["n"]
    both = jnp.concatenate([right["matrix"] @ left["vector"], left["matrix"] @ right["vector"]])
    vector = jnp.tanh(both @ params["u"] + left["matrix"] @ params["b"] + params["b"])
    v.scatter({"matrix": jnp.tanh(own), "vector": vector})
    v.push(vector)


@jax.custom_vjp
def clipped_identity(x: Any) -> Any:
    """Returns x; its cotangents are clipped."""
    return x


clipped_identity.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -0.3, 0.3),))


def custom_derivatives(params: Any, v: cavs.Vertex) -> None:
    """Functions with derivatives of their own, cusps, row reductions, and a value whose gradient is stopped."""
    right = v.gather(1)
    z, h = _norms(v.gather(0), right, v.pull(), params)
    v.scatter(h)
    # Not the maximum of z: JAX divides its derivative among the elements equal to it, and if XLA computes z in two kernels with
    # different rounding, no element is.
    v.push(jnp.concatenate([h, z[jnp.argsort(h)[:2]], jnp.max(right * params["gain"])[None]]))


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


def one_kind(activation: Callable[[Any], Any], name: str) -> Any:
    """The function of one of three kinds of vertices, each of which reads and pushes different values."""

    def fn(params: Any, v: cavs.Vertex) -> None:
        kids = v.gather(0) + v.gather(1) if name != "word" else v.gather(1)
        h = activation(kids @ params[name] + (v.pull() @ params["w"] if name != "root" else 0.1))
        v.scatter(h)
        v.push(h if name != "phrase" else 2 * h)

    return fn
