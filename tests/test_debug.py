"""The debugging tools: `interpret`, `compare` and `find_nan`."""

import functools
import gc
import sys
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import vertex_programs as vp
from tests.odd_graphs import chain, from_children, joined, random_binary_tree, with_kinds
from tests.programs import E, H
from tests.truth import assert_close

DAG = from_children([[], [], [0, 1], [0, 0], [2, 3], [2], [4, 5]])
GRAPHS_ = joined([chain(2), DAG])
N = GRAPHS_.num_vertices
RNG = np.random.default_rng(0)
X = RNG.standard_normal((N, E))
PARAMS = {"u": RNG.standard_normal((H, H)) / 2, "w": RNG.standard_normal((E, H))}
# An inner vertex of the second graph: vertex 2, row 4, level 1.
ROW = 4


def made(fn: Any, **kwargs: Any) -> cavs.VertexFunction:
    return cavs.VertexFunction(fn, **{"state": (H,), "arity": 2} | kwargs)


def cell(params: Any, v: cavs.Vertex) -> Any:
    """z of a plain cell."""
    x = v.pull("x") if isinstance(v.pull(), dict) else v.pull()
    return (v.gather(0) + v.gather(1)) @ params["u"] + x @ params["w"]


# ---- interpret ----


def test_print_and_breakpoint_see_real_values(capsys: Any, monkeypatch: Any) -> None:
    seen = []

    def fn(params: Any, v: cavs.Vertex) -> None:
        h = jnp.tanh(cell(params, v))
        if h[0] > 0.9:  # a Python branch on a value: valid here, refused by run
            breakpoint()
        print("h[0] is", float(h[0]))
        v.scatter(h)
        v.push(h)

    monkeypatch.setattr(sys, "breakpointhook", lambda: seen.append(np.asarray(sys._getframe(1).f_locals["h"])))
    out = cavs.interpret(made(fn), PARAMS, GRAPHS_[1], X[2:])
    assert len(capsys.readouterr().out.splitlines()) == len(out) == 7
    assert len(seen) == int((out[:, 0] > 0.9).sum())


def test_a_failing_assertion_names_its_vertex() -> None:
    def fn(params: Any, v: cavs.Vertex) -> None:
        assert not (v.num_children() == 2 and v.pull("row") > 5), "here"
        v.scatter(cell(params, v))
        v.push(v.pull("row"))

    with pytest.raises(AssertionError, match="here") as error:
        cavs.interpret(made(fn), PARAMS, GRAPHS_, {"x": X, "row": np.arange(N)})
    assert error.value.__notes__ == ["in F at vertex 4 of graph 1 (row 6, level 2)"]


@jax.tree_util.register_pytree_node_class
class Anew:
    """Makes its leaf each time it is flattened."""

    def __init__(self, w: Any):
        self.w = w

    def tree_flatten(self) -> tuple[Any, None]:
        return (self.w + 0 if isinstance(self.w, jax.Array) else self.w,), None

    @classmethod
    def tree_unflatten(cls, aux: None, leaves: Any) -> "Anew":
        return cls(*leaves)


def test_params_may_make_their_leaves_anew() -> None:
    function = made(lambda params, v: v.scatter(v.gather(0) + v.pull()) or v.push(v.pull() * params.w), state=(E,))
    got = cavs.run(function, Anew(jnp.ones(E)), cavs.schedule(GRAPHS_), X)
    np.testing.assert_allclose(cavs.interpret(function, Anew(jnp.ones(E)), GRAPHS_, X), got, rtol=1e-12)


def test_f_may_change_the_states_that_it_gathers() -> None:
    def fn(params: Any, v: cavs.Vertex) -> None:
        first = v.gather(0)
        first["h"] = 2 * first["h"] + v.pull()
        added = v.gather_all(lambda state: state.update(h=state["h"] + 1) or state["h"])
        v.scatter(first)
        v.push(added + v.gather(1)["h"])

    function = made(fn, state={"h": (E,)})
    got = cavs.run(function, PARAMS, cavs.schedule(GRAPHS_), X)
    np.testing.assert_allclose(cavs.interpret(function, PARAMS, GRAPHS_, X), got, rtol=1e-12)


def test_a_compiled_gradient_of_a_maximum_arrives() -> None:
    def tree(p: Any, v: cavs.Vertex) -> None:
        top = v.gather_all(reduce="max")
        h = jnp.tanh(v.gather_all(lambda s: (s.sum(), s), reduce="softmax") + top * p + v.pull())
        v.scatter(h)
        v.push(h)

    F, graphs = cavs.VertexFunction(tree, state=(4,)), random_binary_tree(6, seed=3)
    x, p = np.random.default_rng(3).normal(size=(graphs.num_vertices, 4)), np.full(4, 0.3)
    gradient = jax.grad(lambda p: jnp.sin(cavs.interpret(F, p, graphs, x)).sum())
    # XLA then rounded the operand differently when it computed it again.
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": False, "xla_backend_extra_options": ""}
    assert_close(jax.jit(gradient, compiler_options=options)(p), jax.jit(gradient)(p), 1e-12)


def test_leaves_that_are_not_arrays_are_named() -> None:
    with pytest.raises(TypeError, match=r"params: got a function at \['f'\]; expected only arrays of numbers. For an Equi"):
        cavs.interpret(made(cell), {"f": lambda x: x}, GRAPHS_, X)


@pytest.mark.parametrize("function", [cavs.interpret, cavs.debug.compare, cavs.debug.find_nan])
def test_what_is_no_vertex_function_is_named(function: Any) -> None:
    with pytest.raises(
        TypeError, match=f"^{function.__name__}: F: got a function; expected a cavs.VertexFunction. Write cavs.Ver"
    ):
        function(cell, PARAMS, GRAPHS_, X)


# ---- compare ----


def test_a_program_agrees_with_the_interpreter() -> None:
    program = vp.ChildSumTreeLSTM(H, E)
    report = cavs.debug.compare(
        program.vertex_function(), program.init(jax.random.key(0)), GRAPHS_, X.astype(np.float32), gradients=False
    )
    assert report.first is None and str(report).startswith("run and interpret agree: states and pushes of 9 vertices, largest")


def test_a_comparison_does_not_keep_its_function_alive() -> None:
    """Nor that of `find_nan`."""

    def cell(w: jax.Array, v: cavs.Vertex) -> None:
        v.scatter(h := w * (v.pull() + v.gather(0)))
        v.push(h)

    F = cavs.VertexFunction(cell, state=(), arity=1)
    args = jnp.float64(2), cavs.from_lengths([2]), jnp.ones(2)
    assert cavs.debug.compare(F, *args).first is None and cavs.debug.find_nan(F, *args) is None
    alive = weakref.ref(F)
    del F
    gc.collect()
    assert alive() is None


def test_the_first_difference_is_named() -> None:
    def fn(params: Any, v: cavs.Vertex) -> None:
        h = jnp.tanh((v.gather(0)["h"] + v.gather(1)["h"]) @ params["u"] + v.pull("x") @ params["w"])
        h = h.at[3].add(v.pull("flag") if type(v) is cavs.Vertex else 0)
        v.scatter({"h": h, "n": jnp.int32(0) if v.is_leaf() else v.gather(0)["n"] + 1})
        v.push({"sum": h.sum(), "h": h})

    F = made(fn, state={"h": (H,), "n": jax.ShapeDtypeStruct((), jnp.int32)})
    flag = np.zeros(N)
    flag[[ROW, 6, 8]] = 0.25
    report = cavs.debug.compare(F, PARAMS, GRAPHS_, {"x": X, "flag": flag}, gradients=False)
    first = report.first
    assert first is not None and first.symbol == "state['h']" and abs(first.error - 0.25) < 1e-9
    assert (first.row, first.graph, first.vertex, first.level) == (ROW, 1, 2, 1) and first.vertices == 4
    assert [d.symbol for d in report.differences] == ["state['h']", "push['h']", "push['sum']"]
    assert "first: state['h'] at vertex 2 of graph 1 (row 4, level 1): run has " in str(report) and "(entry [3])" in str(report)
    assert cavs.debug.compare(F, PARAMS, GRAPHS_, {"x": X, "flag": flag}, gradients=False, tolerance=10.0).first is None


def test_wrong_arguments_of_compare_and_find_nan_are_named() -> None:
    """A schedule of other graphs was reported as a difference of the engines."""

    def fn(params: Any, v: cavs.Vertex) -> None:
        h = jnp.tanh(cell(params, v))
        v.scatter(h)
        v.push(h)

    compare = functools.partial(cavs.debug.compare, made(fn), PARAMS, GRAPHS_)
    for error, match, arguments in (
        (
            ValueError,
            r"compare: inputs: got leaves of shapes \[\(1, .*; expected a first axis of \d+, one row per vertex",
            (X[:1],),
        ),
        (ValueError, "compare: inputs: got leaves of shapes .*; expected a first axis of", (X.tolist(),)),
    ):
        with pytest.raises(error, match=match):
            compare(*arguments)
    with pytest.raises(ValueError, match=r"compare: sched: got a schedule of 2 vertices; expected one of graphs, which have"):
        compare(X, sched=cavs.schedule(GRAPHS_[0]))
    with pytest.raises(TypeError, match="compare: sched: got a Graphs; expected a cavs.Schedule"):
        compare(X, sched=GRAPHS_)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="compare: tolerance: got a str; expected a number, or None"):
        compare(X, tolerance="1e-3")  # type: ignore[arg-type]
    for wrong in (-1, float("nan")):
        with pytest.raises(ValueError, match=f"compare: tolerance: got {wrong}; expected a number >= 0, or None"):
            compare(X, tolerance=wrong)
    with pytest.raises(TypeError, match="find_nan: loss: got a int; expected a function of 1 argument"):
        cavs.debug.find_nan(made(fn), PARAMS, GRAPHS_, X, loss=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="find_nan: infinities: got 'no'; expected True or False"):
        cavs.debug.find_nan(made(fn), PARAMS, GRAPHS_, X, infinities="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="compare: gradients: got 'no'; expected True or False"):
        compare(X, gradients="no")  # type: ignore[arg-type]


def test_gradients_that_differ_are_named_from_the_roots_down() -> None:
    def fn(params: Any, v: cavs.Vertex) -> None:
        z = cell(params, v)
        h = jnp.tanh(z)
        if type(v) is cavs.Vertex:  # the same value with another gradient
            h = jnp.where(v.pull("flag"), jax.lax.stop_gradient(h), h)
        v.scatter(h)
        v.push(h)

    report = cavs.debug.compare(made(fn), PARAMS, GRAPHS_, {"x": X, "flag": np.arange(N) == 6})
    of_params = ["gradient of params['u']", "gradient of params['w']"]
    # Row 6 blocks the gradient: its own gradient is right, those of its children 4 and 5 are wrong.
    assert [d.symbol for d in report.differences] == ["gradient of inputs['x']", "gradient of state", *of_params]
    assert report.differences[0].row == 6 and report.differences[1].row == ROW


def test_functions_with_gather_all_are_compared_on_vertices_with_more_children_than_arity() -> None:
    def fn(params: Any, v: cavs.Vertex) -> None:
        h = jnp.tanh((v.gather(0) + v.gather_all(jnp.sin)) @ params["u"] + v.pull("x") @ params["w"])
        v.scatter(h)
        v.push(h)

    F = cavs.VertexFunction(fn, state=(H,), arity=1)
    assert np.diff(GRAPHS_.child_offsets).max() > 1
    assert cavs.debug.compare(F, PARAMS, GRAPHS_, {"x": X}, gradients=False).first is None
    assert cavs.debug.find_nan(F, PARAMS, GRAPHS_, {"x": X}) is None


def test_differences_in_kinds_and_no_inputs_and_no_graphs() -> None:
    def fn(params: Any, v: cavs.Vertex) -> None:
        h = jnp.tanh(v.gather_all(lambda s: s) @ params["u"] + 1)
        v.scatter(h)
        v.push(h)

    F = cavs.VertexFunction({"a": fn, "b": fn}, state=(H,))
    graphs = with_kinds(GRAPHS_, ("a", "b"))
    serial = cavs.schedule(graphs, policy="serial")
    assert cavs.debug.compare(F, PARAMS, graphs, engine="scan", sched=serial, gradients=False).first is None
    assert cavs.debug.compare(F, PARAMS, graphs[:0]).first is None and cavs.debug.find_nan(F, PARAMS, graphs[:0]) is None


# ---- find_nan ----


def line_of(report: Any) -> str:
    return report.source.split(": ", 1)[1]


def test_nan_forward() -> None:
    def fn(params: Any, v: cavs.Vertex) -> None:
        h = jnp.tanh((v.gather(0)["h"] + v.gather(1)["h"]) @ params["u"] + v.pull("x") @ params["w"])
        z = jnp.where(v.pull("x")[0] > 1e6, jnp.nan, h)  # a NaN that is not selected has no effect
        z = z / v.pull("size")
        h = jax.nn.softplus(z) - jnp.exp(z)  # inf - inf
        v.scatter({"h": h, "bits": jax.random.bits(v.pull("key"), (2,), "uint32")})
        v.push(h.sum())

    state = {"h": (H,), "bits": jax.ShapeDtypeStruct((2,), jnp.uint32)}
    size = np.ones(N)
    size[[ROW, 8]] = 0
    inputs = {"x": X, "size": size, "key": jax.random.split(jax.random.key(0), N)}
    F = made(fn, state=state)
    report = cavs.debug.find_nan(F, PARAMS, GRAPHS_, inputs)
    assert report is not None and (report.where, report.symbol) == ("forward", "state['h']")
    assert (report.row, report.graph, report.vertex, report.level) == (ROW, 1, 2, 1)
    assert report.equation is not None and report.equation.startswith("sub of float64[5]") and "inf" in report.equation
    assert line_of(report) == "h = jax.nn.softplus(z) - jnp.exp(z)  # inf - inf" and "fn: h = " in str(report)
    report = cavs.debug.find_nan(F, PARAMS, GRAPHS_, inputs, infinities=True)
    assert report is not None and line_of(report) == 'z = z / v.pull("size")'
    assert cavs.debug.find_nan(F, PARAMS, GRAPHS_, inputs | {"size": np.ones(N)}) is None


def test_nan_in_the_gradient() -> None:
    def fn(params: Any, v: cavs.Vertex) -> None:
        z = jnp.tanh(cell(params, v)) * v.pull("size")
        norm = jnp.sqrt(jnp.sum(z * z))  # its derivative at 0 is infinite
        v.scatter(z)
        v.push(z * norm)

    size = np.ones(N)
    size[ROW] = 0
    report = cavs.debug.find_nan(made(fn), PARAMS, GRAPHS_, {"x": X, "size": size})
    assert report is not None and report.where == "gradient" and (report.row, report.level) == (ROW, 1)
    assert report.equation is not None and "in the transpose of" in report.equation and "inf" in report.equation
    assert line_of(report).startswith("norm = jnp.sqrt(")
    assert "gradient: gradient of " in str(report) and "vertex 2 of graph 1" in str(report)


def test_nan_in_the_gradient_over_any_number_of_children_and_integers() -> None:
    def fn(params: Any, v: cavs.Vertex) -> None:
        top = v.gather_all(lambda s: s["h"] @ params["u"])
        z = top + v.pull() @ params["w"]
        h = jnp.where(z > 0, jnp.sqrt(z), 0)  # of negative values where it is not selected
        v.scatter({"h": h, "n": jnp.int32(0) if v.is_leaf() else v.gather_all(lambda s: s["n"])})
        v.push({"h": h, "n": v.num_children()})

    F = made(fn, state={"h": (H,), "n": jax.ShapeDtypeStruct((), jnp.int32)}, arity=0)
    params = PARAMS | {"w": PARAMS["w"] - 2}
    report = cavs.debug.find_nan(F, params, GRAPHS_, X)
    assert report is not None and report.where == "gradient"
    assert line_of(report).startswith("h = jnp.where(z > 0, jnp.sqrt(z), 0)")


def test_nan_of_a_function_without_a_derivative() -> None:
    def fn(params: Any, v: cavs.Vertex) -> None:
        h = jax.lax.while_loop(lambda h: h > 1, lambda h: h / 2, v.gather(0) + v.pull())
        v.scatter(h)
        v.push(jnp.sqrt(h))

    F, chains = cavs.VertexFunction(fn, state=(), arity=1), joined([chain(2), chain(3)])
    assert cavs.debug.find_nan(F, {}, chains, np.ones(5)) is None
    report = cavs.debug.find_nan(F, {}, chains, np.array([1, 1, 1, -9, 1.0]))
    assert report is not None and (report.where, report.row) == ("forward", 3)
    with pytest.raises(ValueError, match="find_nan: inputs: got leaves of shapes .* axis of 5, one row per vertex"):
        cavs.debug.find_nan(F, {}, chains, np.ones(4))


def test_nan_outside_of_f() -> None:
    program, chains, x = vp.ElmanRNN(H, E, jnp.float64), joined([chain(2), chain(3)]), X[:5].copy()
    params, F = program.init(jax.random.key(0)), program.vertex_function()
    x[4, 1] = np.nan
    report = cavs.debug.find_nan(F, params, chains, x)
    assert str(report) == "inputs: inputs is the first NaN at vertex 2 of graph 1 (row 4, level 2)"
    report = cavs.debug.find_nan(F, params | {"b": params["b"].at[0].set(np.nan)}, chains, X[:5])
    assert str(report) == "params: params['b'] is the first NaN"
    report = cavs.debug.find_nan(F, params, chains, X[:5], loss=lambda h: jnp.log(h[3] * 0).sum())
    assert report is not None and (report.where, report.symbol, report.row) == ("loss", "gradient of push", 3)
    assert cavs.debug.find_nan(F, params, chains, X[:5], loss=lambda h: (h**2).sum()) is None
    assert cavs.debug.find_nan(F, params, chains, X[:5], loss=lambda h: 1.5) is None
    report = cavs.debug.find_nan(F, params, chains, X[:5], loss=lambda h: jnp.log(h - 5).sum())  # its derivative is finite
    assert str(report) == "loss: its value is the first NaN"
    for loss, got in ((lambda h: h.sum(1), r"float64\[5\]"), (lambda h: (h.sum(), h), r"\('float64\[\]', 'float64\[5, 5\]'\)")):
        with pytest.raises(TypeError, match=f"find_nan: loss: returned '?{got}'?; expected a real scalar. Write lambda"):
            cavs.debug.find_nan(F, params, chains, X[:5], loss=loss)
    infinite = params | {"b": params["b"].at[0].set(np.inf)}
    report = cavs.debug.find_nan(F, infinite, chains, X[:5], infinities=True)
    assert str(report) == "params: params['b'] is the first NaN or infinity"
    # The line is inside the vertex program of the library.
    report = cavs.debug.find_nan(F, params | {"w": params["w"].at[0].set(np.inf)}, chains, X[:5] * 0)
    assert report is not None and report.source is not None and "elman_rnn.py" in report.source
