"""Every misuse is an error that says what it got, what was expected and what to write."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import vertex_programs as vp
from tests.odd_graphs import GRAPHS, from_children, with_kinds
from tests.programs import PROGRAMS, E, H
from tests.truth import batch_inputs, sched

TREE, ONES = from_children([[], [], [0, 1]]), np.ones((3, H))


def good(params: Any, v: cavs.Vertex) -> None:
    """A vertex function without fault."""
    h = v.gather(0) @ params["u"] + v.pull()
    v.scatter(h)
    v.push(h)


def call(fn: Any, inputs: Any = ONES, **kwargs: Any) -> Any:
    """Runs `fn` over a tree of three vertices."""
    function = cavs.VertexFunction(fn, state=kwargs.pop("state", (H,)), arity=kwargs.pop("arity", 2))
    return cavs.run(function, {"u": np.eye(H)}, kwargs.pop("sched", cavs.schedule(TREE)), inputs, **kwargs)


def add(n: Any, v: cavs.Vertex) -> None:
    v.scatter(v.pull())
    v.push(v.pull() + jax.tree.leaves(n)[0])


TWO, F_OF_INTS = cavs.from_lengths([2]), cavs.VertexFunction(add, state=jax.ShapeDtypeStruct((), jnp.int32))


def test_the_good_one_runs() -> None:
    assert call(good).shape == (3, H)


def test_a_program_has_sizes() -> None:
    with pytest.raises(ValueError, match="got a matrix of weights without rows and columns; expected sizes"):
        vp.ChildSumTreeLSTM(0, 0).init(jax.random.key(0))
    for program, text in [
        (vp.MultiLayerLSTM(H, H, layers=0), "MultiLayerLSTM: layers: got 0; expected an int >= 1. Write layers=2"),
        (vp.LSTM(-1, H), "LSTM: hidden: got -1; expected an int >= 0. Write hidden=64"),
    ]:
        with pytest.raises(ValueError, match=text):
            program.init(jax.random.key(0))
    with pytest.raises(TypeError, match="BinaryTreeLSTM: leaf_inputs_only: got 'no'; expected True or False"):
        vp.BinaryTreeLSTM(4, 3, leaf_inputs_only="no").init(jax.random.key(0))
    with pytest.raises(TypeError, match="Optimizations: lazy: got 'no'; expected True or False"):
        cavs.Optimizations(lazy="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="BiLSTM.run: ends: got 'no'; expected True or False"):
        vp.BiLSTM(4, 3).run([], cavs.schedule(TWO), cavs.schedule(TWO), ONES, ends="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="TreeFC: hidden: got True; expected an int"):
        vp.TreeFC(True).init(jax.random.key(0))
    with pytest.raises(TypeError, match=r"LSTM: hidden: got '64'; expected an int. Write hidden=64."):
        vp.LSTM("64", 3).init(jax.random.key(0))
    for key in (0, np.uint32(1), jnp.float32(1)):
        with pytest.raises(TypeError, match=r"init: key: got .*; expected a key. Write program.init\(jax.random.key\(0\)\)."):
            vp.LSTM(4, 3).init(key)
    assert vp.LSTM(4, 3).init(jax.random.PRNGKey(0))


# ---- VertexFunction ----


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (
            {"fn": 3, "state": (H,)},
            TypeError,
            "fn: got a int; expected a function of 2 arguments, (params, v). Write def F(params, v), or",
        ),
        ({"fn": {"leaf": None}, "state": (H,)}, TypeError, "fn['leaf']: got a NoneType; expected a function"),
        (
            {"fn": lambda v: None, "state": (H,)},
            TypeError,
            "fn: got <lambda>(v); expected a function of 2 arguments, (params, v).",
        ),
        ({"fn": {"leaf": lambda p, v, x: None}, "state": (H,)}, TypeError, "fn['leaf']: got <lambda>(p, v, x); expected a"),
        ({"fn": good, "state": (H,), "arity": -1}, ValueError, "arity: got -1; expected an int >= 0"),
        ({"fn": good, "state": (H,), "arity": 2.0}, ValueError, "arity: got 2.0; expected an int >= 0"),
        (
            {"fn": good, "state": (H,), "optimizations": {"lazy": False}},
            TypeError,
            "optimizations: got a dict; expected cavs.Optimizations. Write optimizations=cavs.Optimizations(lazy=False)",
        ),
        ({"fn": good, "state": {"h": H}}, TypeError, f"state: got a leaf {H}; expected shapes"),
        ({"fn": good, "state": {"h": (-1,)}}, TypeError, "expected shapes. Write"),
        ({"fn": good, "state": {}}, ValueError, "state: got no leaves; expected at least one shape"),
    ],
)
def test_vertex_function(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=re.escape(match)):
        cavs.VertexFunction(**arguments)


def test_explain_before_a_run() -> None:
    with pytest.raises(ValueError, match=re.escape("Write cavs.explain(F, params, inputs) with the inputs of ONE vertex")):
        cavs.explain(cavs.VertexFunction(good, state=(H,), arity=1))
    with pytest.raises(
        TypeError, match=re.escape("explain: sched: got a Graphs; expected a cavs.Schedule. Write cavs.schedule")
    ):
        cavs.explain(cavs.VertexFunction(good, state=(H,), arity=1), sched=TREE)


# ---- run ----


def test_pull_without_inputs() -> None:
    with pytest.raises(
        ValueError, match=re.escape("pull: got a run without inputs; expected inputs. Write cavs.run(F, params, sched, inputs)")
    ):
        call(good, None)


def test_pull_of_a_name_that_inputs_lack() -> None:
    def fn(params: Any, v: cavs.Vertex) -> None:
        v.pull("words")

    with pytest.raises(
        ValueError,
        match=re.escape("name: got 'words'; expected a key of inputs, which has ['tag', 'word']. Write inputs={'words'"),
    ):
        call(fn, {"word": np.ones((3, 1)), "tag": np.ones(3)})
    for inputs, what in ((ONES, "an array"), ((ONES,), "a tuple")):
        with pytest.raises(
            ValueError, match=f"expected a key of inputs, which is {what}, not a dict. .* or v.pull\\(\\) for all"
        ):
            call(fn, inputs)


def test_a_dict_in_place_of_an_array() -> None:
    match = r"F uses a dict as an array \(.*test_misuse.py, line \d+, in \w+: h = .* Write v.pull\('name'\) or v.gather"
    with pytest.raises(TypeError, match=match):
        call(good, {"word": ONES})
    with pytest.raises(TypeError, match=match):
        call(good, state={"h": (H,)})


def test_a_nested_list_in_place_of_a_matrix() -> None:
    function = cavs.VertexFunction(good, state=(H,), arity=2)
    with pytest.raises(TypeError, match=r"F uses a list as an array \(.*: h = .* Write jnp.asarray\(rows\) for nested lists"):
        cavs.run(function, {"u": np.eye(H).tolist()}, cavs.schedule(TREE), ONES)


@pytest.mark.parametrize("x", [np.full((3, H), "a"), np.full((3, H), None)], ids=["text", "objects"])
def test_inputs_that_are_no_numbers(x: np.ndarray) -> None:
    with pytest.raises(
        TypeError, match=re.escape(f"inputs: got an array of {x.dtype} at the root; expected only arrays of num")
    ):
        call(good, x)


@pytest.mark.parametrize(
    ("inputs", "match"),
    [
        (
            np.ones((2, H)),
            f"inputs: got leaves of shapes [(2, {H})]; expected a first axis of 3 (one row per vertex) or 16 (padded)",
        ),
        ({"a": np.ones((3, H)), "b": np.ones((16, H))}, "expected a first axis of 3"),
        (np.ones(()), "expected a first axis of 3"),
        (
            [[1.0] * H] * 3,
            "expected a first axis of 3 (one row per vertex) or 16 (padded). Write np.asarray(rows) for nested lists.",
        ),
    ],
)
def test_inputs_of_the_wrong_length(inputs: Any, match: str) -> None:
    with pytest.raises(ValueError, match=re.escape(match)):
        call(good, inputs)


BIG = np.array([1, 2**40 + 1])


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("run: inputs", lambda x: cavs.run(F_OF_INTS, jnp.int32(1), cavs.schedule(TWO), x)),
        ("run: params", lambda x: cavs.run(F_OF_INTS, {"n": x}, cavs.schedule(TWO), jnp.arange(2))),
        ("run: params", lambda x: cavs.run(F_OF_INTS, {"n": int(x[1])}, cavs.schedule(TWO), jnp.arange(2))),
        ("run: select", lambda x: cavs.run(F_OF_INTS, jnp.int32(1), cavs.schedule(TWO), jnp.arange(2), select=x)),
        ("interpret: inputs", lambda x: cavs.interpret(F_OF_INTS, jnp.int32(1), TWO, x)),
        ("readout: values", lambda x: cavs.readout(x, cavs.schedule(TWO))),
        ("rows: ids", lambda x: cavs.data.rows(jnp.ones((3, 2)), x)),
        ("mean: x", lambda x: cavs.data.mean(x)),
        ("total: x", lambda x: cavs.data.total(x)),
        ("softmax_loss: labels", lambda x: cavs.data.softmax_loss(jnp.ones((2, 3)), jnp.ones((3, 4)), jnp.zeros(4), x)),
    ],
)
def test_values_that_32_bits_cannot_hold(name: str, use: Any) -> None:
    """JAX takes the lower half of an integer: 1 for 2**40 + 1."""
    with jax.enable_x64(False), pytest.raises(ValueError, match=f"{name}: got dtype int.* expected values that fit int32"):
        use(BIG)


def test_inputs_under_jit_must_be_padded() -> None:
    with pytest.raises(
        ValueError, match=re.escape("expected a first axis of 16 (padded). Under jax.jit, write sched.pad(rows)")
    ):
        jax.jit(lambda s, x: call(good, x, sched=s))(cavs.schedule(TREE), np.ones((3, H)))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"F": good}, TypeError, "F: got a function; expected a cavs.VertexFunction. Write cavs.VertexFunction(fn, state=...)"),
        ({"F": vp.LSTM(H, E)}, TypeError, "or program.vertex_function() for a ready vertex program"),
        ({"sched": TREE}, TypeError, "sched: got a Graphs; expected a cavs.Schedule. Write cavs.schedule(graphs)"),
        (
            {"sched": cavs.data.Batches(None, 2)},
            TypeError,
            "sched: got a Batches; expected a cavs.Schedule. Write @cavs.data.st",
        ),
        ({"engine": "turbo"}, ValueError, "engine: got 'turbo'; expected None or one of 'scan'"),
        ({"params": {"u": "u"}}, TypeError, "run: params: got a str at ['u']; expected only arrays"),
        ({"engine": "persistant"}, ValueError, "'native'. Did you mean persistent?"),
        (
            {"select": np.zeros((2, 2), int)},
            ValueError,
            "select: got shape (2, 2) and dtype int64; expected a 1-d array of ints",
        ),
        ({"select": np.zeros(2)}, ValueError, "and dtype float64; expected a 1-d array of ints"),
        ({"select": "roots"}, TypeError, "run: select: got a str; expected an array of numbers"),
    ],
)
def test_run(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    program = PROGRAMS["ElmanRNN"]
    given = {
        "F": program.function,
        "params": program.params,
        "sched": sched("chains"),
        "inputs": batch_inputs("ElmanRNN", "chains"),
    }
    with pytest.raises(error, match=re.escape(match)):
        cavs.run(**given | arguments)


def test_kinds_without_a_function() -> None:
    graphs = with_kinds(GRAPHS["trees"], ("leaf", "inner", "root"))
    program = PROGRAMS["RvNN"]
    with pytest.raises(
        ValueError, match=re.escape("kind 'root' (kinds ['leaf', 'inner', 'root']); expected the kinds of F, ['inner', 'leaf']")
    ):
        cavs.run(program.function, program.params, cavs.schedule(graphs), program.inputs(graphs.num_vertices))
    with pytest.raises(ValueError, match="got graphs without kinds; expected the kinds of F, .* kind_names="):
        cavs.run(program.function, program.params, cavs.schedule(TREE), program.inputs(3))


# ---- schedule ----


def test_schedule() -> None:
    with pytest.raises(TypeError, match=re.escape("graphs: got a list; expected cavs.Graphs")):
        cavs.schedule([TREE])
    with pytest.raises(ValueError, match="policy: got 'greedy'; expected 'batching' or 'serial'"):
        cavs.schedule(TREE, policy="greedy")
    with pytest.raises(ValueError, match="exact: got 'no'; expected True or False"):
        cavs.schedule(TREE, exact="no")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scripts: got 2; expected None, True or False"):
        cavs.schedule(TREE, scripts=2)  # type: ignore[arg-type]
    for value in (np.array(["a", "b"]), np.array(1), ["batching"], {"a": 1}):
        for name in ("policy", "kinds", "exact", "scripts"):
            with pytest.raises(ValueError, match=f"schedule: {name}: got {re.escape(repr(value))}; expected"):
                cavs.schedule(TREE, **{name: value})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="schedule: fields: got .*; expected"):
            cavs.schedule(TREE, fields=[value])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"fields: got array\(1\); expected a sequence of names"):
        cavs.schedule(TREE, fields=np.array(1))  # type: ignore[arg-type]


def test_attributes_of_a_schedule() -> None:
    with pytest.raises(AttributeError, match="Schedule has no attribute 'labels'. Did you mean label?"):
        cavs.schedule(TREE).labels  # noqa: B018
    with pytest.raises(AttributeError, match="Schedule has no attribute 'order'"):
        _ = cavs.schedule(TREE).order
    with pytest.raises(ValueError, match="several roots.*Read out with schedule.graph"):
        _ = cavs.schedule(GRAPHS["shared children"]).roots


def test_padding_rows_of_the_wrong_length() -> None:
    with pytest.raises(ValueError, match=re.escape("array: got shape (2, 5); expected (3, ...)")):
        cavs.schedule(TREE).pad(np.ones((2, 5)))
    with pytest.raises(
        ValueError,
        match=re.escape(
            "got a dict; expected (3, ...), one row per vertex. For a pytree of arrays, write jax.tree.map(sched.pad, rows)."
        ),
    ):
        cavs.schedule(TREE).pad({"x": np.ones((3, 5))})  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=re.escape("Schedule.pad: array: got lists or arrays of different shapes; expected")):
        cavs.schedule(TREE).pad([[1], [1, 2]])
    with pytest.raises(ValueError, match=re.escape("pad_edges: array: got None; expected (2, ...), one row per edge.")):
        cavs.schedule(TREE).pad_edges(TREE.edge_attr)


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [
        *((np.int32, np.nan), (np.int32, 0.5), (np.uint8, -1), (bool, -1), (int, "none")),
        *((np.float32, "none"), (np.float32, None), (np.float32, 1j), (jnp.bfloat16, 1j), (np.float16, 1e6), (jnp.int4, 100)),
    ],
)
def test_padding_that_the_dtype_cannot_hold(dtype: Any, fill: Any) -> None:
    sched = cavs.schedule(TREE)
    for pad, rows in ((sched.pad, 3), (sched.pad_edges, 2)):
        with pytest.raises(ValueError, match=re.escape(f": fill: got {fill!r}; expected a value of {np.dtype(dtype)}, which")):
            pad(np.zeros(rows, dtype), fill)
    assert sched.pad(np.zeros(3, bool), True).sum() == sched.shape.vertices - 3
    assert sched.pad(np.zeros(3, np.int8), -1.0)[-1] == -1


# ---- interpret ----


def test_interpret() -> None:
    function = cavs.VertexFunction(good, state=(H,), arity=1)
    with pytest.raises(ValueError, match=re.escape(f"inputs: got leaves of shapes [(4, {H})]; expected a first axis of 3")):
        cavs.interpret(function, {"u": np.eye(H)}, TREE, np.ones((4, H)))
    with pytest.raises(ValueError, match="interpret: F: got no push at row 0; expected one"):
        cavs.interpret(
            cavs.VertexFunction(lambda params, v: v.scatter(v.pull()), state=(H,)), {"u": np.eye(H)}, TREE, np.ones((3, H))
        )


def test_what_is_not_graphs(tmp_path: Path) -> None:
    function, sched = cavs.VertexFunction(good, state=(H,), arity=1), cavs.schedule(TREE)
    arguments = (function, {"u": np.eye(H)}, sched, ONES)
    for name, use in (("interpret", cavs.interpret), ("find_nan", cavs.debug.find_nan), ("compare", cavs.debug.compare)):
        match = f"{name}: graphs: got a Schedule; expected cavs.Graphs. Write {name}.F, params, graphs, inputs."
        with pytest.raises(TypeError, match=match):
            use(*arguments)
    for name, write in (("save_npz", cavs.io.save_npz), ("write_edges", cavs.io.write_edges)):
        match = f"{name}: graphs: got a PosixPath; expected cavs.Graphs. Write {name}.graphs, path."
        with pytest.raises(TypeError, match=match):
            write(tmp_path / "file", TREE)


@pytest.mark.parametrize("traced", [False, True])
def test_more_children_than_f_sees(traced: bool) -> None:
    program, graphs = vp.BinaryTreeLSTM(5, 3), cavs.from_parents([np.array([-1, 0, 0, 0])])
    params, sched = program.init(jax.random.key(0)), cavs.schedule(graphs)

    def run(sched: cavs.Schedule, x: jax.Array) -> jax.Array:
        return cavs.run(program.vertex_function(), params, sched, x)

    with pytest.raises(ValueError, match="children; expected at most 2.* or take a ready program for any number"):
        (jax.jit(run) if traced else run)(sched, jnp.zeros((sched.shape.vertices, 3), jnp.float32))


@pytest.mark.parametrize("row", [-1, 3])
def test_rows_that_are_no_vertices(row: int) -> None:
    F, params, sched = cavs.VertexFunction(good, state=(H,), arity=2), {"u": np.eye(H)}, cavs.schedule(TREE)
    with pytest.raises(ValueError, match="select: got vertices .*; expected 0 to 2"):
        cavs.run(F, params, sched, ONES, select=np.array([0, row]))
    with pytest.raises(ValueError, match=r"select: got shape \(3,\) and dtype bool; .* or select=np.flatnonzero\(mask\)"):
        cavs.run(F, params, sched, ONES, select=np.arange(3) == row)


def test_a_schedule_that_a_jitted_function_closes_over() -> None:
    F, sched = cavs.VertexFunction(good, state=(H,), arity=2), cavs.schedule(TREE)
    for on_device in (sched, jax.device_put(sched)):
        run = jax.jit(lambda p, s=on_device: cavs.run(F, p, s, ONES, select=s.roots))
        assert run({"u": np.eye(H)}).shape == (1, H)
