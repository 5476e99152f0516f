"""What docs/guide/limits.md says is refused, is refused: each line of its table has a test here, by its text."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs._readers.npz import graphs_to_bytes

PAGE = Path(__file__).parents[1] / "docs" / "guide" / "limits.md"
HEADER = "| what is refused | error |"
ERRORS = {"ValueError": ValueError, "TypeError": TypeError, "OSError": OSError, "FormatError": cavs.io.FormatError}


def table() -> dict[str, type[Exception]]:
    """The lines of the table: what is refused, and the error that the line names first."""
    lines = PAGE.read_text().split(HEADER)[1].splitlines()[2:]
    rows = [line.strip("|").split("|") for line in lines[: lines.index("")]]
    return {what.strip(): ERRORS[re.findall(r"(?:cavs\.io\.)?(\w+Error)`", error)[0]] for what, error in rows}


H = 4
PARAMS = {"w": np.ones((2, H), np.float32), "u": np.eye(H, dtype=np.float32)}
CHAINS = cavs.from_lengths([3, 5])
SCHED = cavs.schedule(CHAINS)
X = np.ones((8, 2), np.float32)


def done(v: Any, h: Any) -> None:
    v.scatter(h)
    v.push(h)


def rnn(p: Any, v: Any) -> None:
    done(v, jnp.tanh(v.pull() @ p["w"] + v.gather(0) @ p["u"]))


def run(fn: Any, graphs: cavs.Graphs = CHAINS, rows: int | None = None, arity: int = 1, **how: Any) -> Any:
    """Runs `fn` on graphs, with as many rows of inputs as vertices unless `rows` says otherwise."""
    x = np.ones((graphs.num_vertices if rows is None else rows, 2), np.float32)
    return cavs.run(cavs.VertexFunction(fn, state=(H,), arity=arity), PARAMS, cavs.schedule(graphs), x, **how)


def of(value: Callable[[Any, Any], Any]) -> Callable[[Any, Any], None]:
    """F that scatters and pushes a value."""
    return lambda p, v: done(v, value(p, v))


def loss(p: Any) -> Any:
    return cavs.run(cavs.VertexFunction(rnn, state=(H,), arity=1), p, SCHED, X).sum()


def damaged(folder: Path, data: bytes) -> Path:
    path = folder / "damaged.npz"
    at = 150  # in the first array
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    return path


def file_of(folder: Path, text: str) -> Path:
    (folder / "a.jsonl").write_text(text)
    return folder / "a.jsonl"


def checkpoint(folder: Path) -> bytes:
    cavs.io.save_checkpoint(PARAMS, folder / "state.npz")
    return (folder / "state.npz").read_bytes()


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def with_kinds(numbers: list[int], *names: str) -> cavs.Graphs:
    """Two vertices over a leaf, of these kinds."""
    return cavs.from_edges([3], [[(1, 0), (2, 0), (2, 1)]], kind=np.array(numbers), kind_names=names)


def escaping(p: Any, v: Any) -> None:
    kept = []
    v.gather_all(lambda s: kept.append(s) or s)
    done(v, kept[0])


def closing_over(w: Any) -> Any:
    return run(of(lambda p, v: v.gather(0) + w))


def looped(p: Any, v: Any) -> Any:
    return jax.lax.fori_loop(0, v.num_children() + 1, lambda i, h: jnp.tanh(h @ p["u"]), v.gather(0) + v.pull() @ p["w"])


def called_back(x: Any) -> Any:
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="expand_dims")


def gradient(fn: Any) -> Any:
    F = cavs.VertexFunction(fn, state=(H,), arity=1)
    return jax.grad(lambda p: cavs.run(F, p, SCHED, X).sum())(PARAMS)


def in_rule(p: Any, v: Any) -> Any:
    fn = jax.custom_vjp(lambda b: v.gather_all(lambda s: s * b))
    fn.defvjp(lambda b: (fn(b), None), lambda _, ct: (ct,))
    return fn(v.pull() @ p["w"])


def in_while(p: Any, v: Any) -> Any:
    return jax.lax.while_loop(lambda h: h[0] < 1, lambda h: v.gather_all(lambda s: s * h) + 1, v.pull() @ p["w"])


class Case(NamedTuple):
    """A use, or several, each of which is refused with a message that matches `text`; `call` takes a folder."""

    text: str
    calls: tuple[Callable[[Path], Any], ...]


def case(text: str, *calls: Callable[[Path], Any]) -> Case:
    return Case(text, calls)


CASES = {
    "graphs with a cycle": case(
        "depends? on itself|cycle",
        lambda _: cavs.from_parents([[1, 0]]),
        lambda _: cavs.from_edges([2], [[(0, 1), (1, 0)]]),
        lambda d: cavs.read(file_of(d, '{"children": [[1], [0]]}')),
    ),
    "an edge to a vertex number that does not exist": case(
        r"expected .*0 to \d",
        lambda _: cavs.from_edges([3], [[(7, 0)]]),
        lambda _: cavs.from_parents([[4, -1]]),
        lambda d: cavs.read(file_of(d, '{"children": [[2], []]}')),
    ),
    "a file that is not in its format": case("line 1: got", lambda d: cavs.read(file_of(d, "(2 w)"))),
    "a damaged file of `save_npz`": case(
        r"damaged.npz: got a file with an error", lambda d: cavs.io.load_npz(damaged(d, graphs_to_bytes(CHAINS)))
    ),
    "a damaged file of `save_checkpoint`": case(
        r"damaged.npz is no complete checkpoint", lambda d: cavs.io.restore_checkpoint(damaged(d, checkpoint(d)), PARAMS)
    ),
    "a pipe or a device in place of a file": case(
        "is not a regular file.*pipe",
        lambda d: cavs.read_trees(pipe(d)),
        lambda d: cavs.io.restore_checkpoint(d / "pipe", PARAMS),
        lambda d: cavs.io.save_npz(CHAINS, d / "pipe"),
    ),
    "inputs whose first axis is neither the number of vertices nor the padded number": case(
        "inputs: got leaves of shapes", lambda _: run(rnn, rows=3), lambda _: run(rnn, rows=9)
    ),
    "`select` with a vertex that does not exist, unless it is traced": case(
        "select: got vertices", lambda _: run(rnn, select=[8]), lambda _: run(rnn, select=[-1])
    ),
    "kinds of vertices without a function": case(
        "got vertices of kind 'b'", lambda _: run({"a": rnn}, with_kinds([0, 1, 0], "a", "b"))
    ),
    "a vertex with more children than `arity`, if the function of its kind does not call `gather_all`": case(
        "with 2 children; expected at most 1",
        lambda _: run(rnn, cavs.from_parents([[2, 2, -1]])),
        lambda _: run({"a": rnn, "b": of(lambda p, v: v.gather_all())}, with_kinds([1, 1, 0], "a", "b")),
    ),
    "`v.gather(k)` with `k` of `arity` or more": case("k: got 1; expected", lambda _: run(of(lambda p, v: v.gather(1)))),
    "`sched.roots` if a graph has several roots": case(
        "several roots", lambda _: cavs.schedule(cavs.from_edges([2], [[]])).roots
    ),
    "an engine that cannot run this `F` here": case("engine: got 'persistent', but", lambda _: run(rnn, engine="persistent")),
    "a Python `if` on a traced value inside `F`": case(
        "test_limits.py, line", lambda _: run(of(lambda p, v: v.gather(0) if v.pull()[0] > 0 else v.gather(0) + 1))
    ),
    "a traced value as a Python integer inside `F`, such as `range(v.num_children())`": case(
        "test_limits.py, line", lambda _: run(of(lambda p, v: sum(v.gather(0) for _ in range(v.num_children()))))
    ),
    "NumPy functions of traced values inside `F`": case(
        "test_limits.py, line", lambda _: run(of(lambda p, v: np.tanh(v.gather(0))))
    ),
    "a change of `params` inside `F`, such as the counter of a Flax NNX dropout": case(
        r"F changes params at \['w'\] .*test_limits.py, line .*that only reads them",
        lambda _: run(of(lambda p, v: p.update(w=2 * p["w"]) or v.gather(0))),
    ),
    "side effects inside `F`, such as `jax.debug.print`": case(
        "side effects .*test_limits.py, line",
        lambda _: run(of(lambda p, v: (jax.debug.print("{}", v.gather(0)), v.gather(0))[1])),
    ),
    "a traced value over which `F` closes": case(
        "closes over a traced value .*line", lambda _: jax.jit(closing_over)(jnp.ones(H, np.float32))
    ),
    "`scatter` called twice or never, `push` never, or a state of another shape or dtype": case(
        "scatter|push",
        lambda _: run(lambda p, v: (done(v, v.gather(0)), v.scatter(v.gather(0)))),
        lambda _: run(lambda p, v: v.push(v.gather(0))),
        lambda _: run(lambda p, v: v.scatter(v.gather(0))),
        lambda _: run(of(lambda p, v: v.gather(0)[:2])),
        lambda _: run(of(lambda p, v: v.gather(0).astype(jnp.float16))),
    ),
    "pushes of different structure at leaves and other vertices, or at vertices of different kinds": case(
        "All vertices must push the same",
        lambda _: run(lambda p, v: (v.scatter(v.gather(0)), v.push(v.gather(0)[: 2 if v.is_leaf() else 3]))),
        lambda _: run(
            {"a": rnn, "b": lambda p, v: (v.scatter(v.gather(0)), v.push((1.0, 2.0)))}, with_kinds([0, 1, 0], "a", "b"), arity=2
        ),
    ),
    "the value of one child outside of the function that `gather_all` got": case(
        "value of one child leaves|closes over a traced value", lambda _: run(escaping)
    ),
    "`gather_all` inside a `while_loop`, or inside a function with a derivative rule of its own": case(
        "gather_all is called inside .*test_limits.py, line", lambda _: run(of(in_while)), lambda _: run(of(in_rule))
    ),
    "the gradient of a loop inside `F` whose number of iterations depends on values": case(
        "test_limits.py, line", lambda _: gradient(of(looped))
    ),
    "the gradient of another operation inside `F` of which JAX has none, such as `jax.pure_callback`": case(
        "F: got pure_callback .*test_limits.py, line .*of which JAX has no reverse derivative .*jax.custom_vjp",
        lambda _: gradient(of(lambda p, v: called_back(v.gather(0) @ p["u"]))),
        lambda _: gradient(of(lambda p, v: called_back(v.pull() @ p["w"]) if v.is_leaf() else v.gather(0) + p["u"][0])),
    ),
    "reverse over reverse of `cavs.run`, as `jax.grad` of `jax.grad`, and reverse over forward": case(
        "run: got a second derivative in reverse mode",
        lambda _: jax.grad(lambda p: jax.grad(loss)(p)["u"].sum())(PARAMS),
        lambda _: jax.grad(lambda p: jax.jvp(loss, (p,), (p,))[1])(PARAMS),
    ),
    "`cavs.concurrent_jit` under another `jax.jit` or `jax.grad`": case(
        "top-level `jax.jit`",
        lambda _: jax.jit(cavs.concurrent_jit(loss))(PARAMS),
        lambda _: jax.grad(cavs.concurrent_jit(loss))(PARAMS),
    ),
}


def test_each_line_has_a_test() -> None:
    assert [*table()] == [*CASES], (
        f"lines of {PAGE} and cases of this file differ: add the missing ones to CASES or to the page"
    )


@pytest.mark.parametrize("what", CASES)
def test_it_is_refused(what: str, tmp_path: Path) -> None:
    for call in CASES[what].calls:
        with pytest.raises(table()[what], match=CASES[what].text):
            call(tmp_path)


def test_too_many_children_of_one_kind_are_refused_under_jit() -> None:
    graphs = with_kinds([1, 1, 0], "a", "b")
    F = cavs.VertexFunction({"a": rnn, "b": of(lambda p, v: v.gather_all())}, state=(H,), arity=1)
    sched = cavs.schedule(graphs)
    with pytest.raises(jax.errors.JaxRuntimeError, match="of kind 'a' with 2 children; expected at most 1"):
        jax.block_until_ready(jax.jit(lambda s, x: cavs.run(F, PARAMS, s, x))(sched, sched.pad(X[:3])))
        jax.effects_barrier()
