"""Every misuse inside of a vertex function is an error that says what it got, what was expected and what to write."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import cavs
from tests.programs import H
from tests.test_misuse import ONES, call, good


def _scatter_twice(params: Any, v: cavs.Vertex) -> None:
    v.scatter(v.pull())
    v.scatter(v.pull())


def _push_twice(params: Any, v: cavs.Vertex) -> None:
    v.push(v.pull())
    v.push(v.pull())


def _push_name_twice(params: Any, v: cavs.Vertex) -> None:
    v.push(v.pull(), "h")
    v.push(v.pull(), "h")


def _push_mixed(params: Any, v: cavs.Vertex) -> None:
    v.push(v.pull(), "h")
    v.push(v.pull())


def _branch(params: Any, v: cavs.Vertex) -> None:
    h = v.gather(0)
    v.scatter(h if h[0] > 0 else -h)


def _leaves_push_less(params: Any, v: cavs.Vertex) -> None:
    v.scatter(v.pull())
    v.push(v.pull() if v.is_leaf() else v.pull()[:2])


def _no_push(params: Any, v: cavs.Vertex) -> None:
    v.scatter(v.pull())


def _inner_scatters_nothing(params: Any, v: cavs.Vertex) -> None:
    if v.is_leaf():
        v.scatter(v.pull())
    v.push(v.pull())


@pytest.mark.parametrize(
    ("fn", "error", "match"),
    [
        (
            lambda p, v: v.gather(2),
            ValueError,
            "k: got 2; expected an int from 0 to 1, as arity is 2. Write VertexFunction(..., arity=3)",
        ),
        (lambda p, v: v.gather(-1), ValueError, "k: got -1; expected an int from 0 to 1"),
        (lambda p, v: v.gather(v.num_children() - 1), ValueError, "expected an int from 0 to 1"),
        (lambda p, v: v.has_child(-1), ValueError, "has_child: k: got -1; expected an int >= 0"),
        (lambda p, v: v.pull("word"), ValueError, "pull: name: got 'word'; expected a key of inputs, which has one"),
        (lambda p, v: v.gather_all(reduce="min"), ValueError, "got 'min'; expected one of 'sum', 'mean', 'max', 'softmax'"),
        (lambda p, v: v.gather_all(reduce=jnp.ones(2)), ValueError, "gather_all: reduce: got Array([1., 1.]"),
        (lambda p, v: v.gather_all(lambda s, e: s, edges="no"), TypeError, "edges: got 'no'; expected True or False"),  # type: ignore[arg-type]
        (lambda p, v: v.gather_all(lambda s: s, reduce="softmax"), ValueError, "fn must return (score, value), score a scalar"),
        (lambda p, v: v.gather_all(lambda s: (s, s), reduce="softmax"), ValueError, "score a scalar"),
        (lambda p, v: v.pull(["word"]), ValueError, "pull: name: got ['word']; expected a key of inputs"),  # type: ignore[arg-type]
        (lambda p, v: v.scatter("h"), TypeError, "scatter: state: got a str at the root; expected only arrays of numbers"),
        (_scatter_twice, ValueError, "scatter: got a second call; expected one"),
        (lambda p, v: v.scatter({"h": v.pull()}), ValueError, "as VertexFunction(state=...) declares"),
        (
            lambda p, v: v.scatter(v.pull()[:2]),
            ValueError,
            f"a leaf of shape (2,) and dtype float64; expected ({H},) and float64",
        ),
        (lambda p, v: v.scatter(v.pull().astype(jnp.int32)), ValueError, "or cast: x.astype(jnp.float64)"),
        (_push_twice, ValueError, "push: got an unnamed value twice"),
        (_push_name_twice, ValueError, "push: got 'h' twice"),
        (_push_mixed, ValueError, "push: got named and unnamed pushes"),
        (_branch, TypeError, "F branches in Python on a traced value"),
        (lambda p, v: float(v.pull()[0]), TypeError, "write jnp.where(condition, a, b)"),
        (lambda p, v: v.push(v.pull()), ValueError, "F scatters nothing at a leaf; write v.scatter(state) exactly once"),
        (_inner_scatters_nothing, ValueError, "F scatters nothing at a vertex with children"),
        (_no_push, ValueError, "F pushes nothing at a leaf, so run would return nothing"),
        (_leaves_push_less, ValueError, "All vertices must push the same structure, shapes and dtypes"),
    ],
)
def test_inside_a_vertex_function(fn: Callable[..., Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=re.escape(match)):
        call(fn)


@pytest.mark.parametrize(
    ("fn", "error"),
    [
        (lambda p, v: v.pull()[:, 0], IndexError),
        (lambda p, v: v.pull().shape[1], IndexError),
        (lambda p, v: jnp.concatenate([v.pull(), v.gather(0)], axis=1), (TypeError, ValueError)),
        (lambda p, v: v.pull()[None] @ jnp.ones((2, 3)), (TypeError, ValueError)),
        (lambda p, v: v.gather(0) + jnp.ones((5, H + 1)), (TypeError, ValueError)),
    ],
)
def test_a_batch_axis_inside_f(fn: Callable[..., Any], error: Any) -> None:
    with pytest.raises(error, match="F is written for one vertex, without a batch axis") as e:
        call(fn)
    assert "in <lambda>: (lambda p, v: " in str(e.value)
    assert f"v.pull() of float64[{H}] and states of float64[{H}] at a leaf" in str(e.value)


@pytest.mark.parametrize("fn", [lambda p, v: v.scatter(v.pull()[None]), lambda p, v: v.scatter(v.pull() + jnp.ones((7, 1)))])
def test_a_batch_axis_of_what_is_scattered(fn: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="F is written for one vertex, without a batch axis. Change VertexFunction"):
        call(fn)


def test_a_batch_axis_of_what_is_pulled() -> None:
    with pytest.raises((TypeError, ValueError), match=r"without a batch axis.*v.pull\(\) of float64\[1, ") as e:
        call(lambda p, v: v.scatter(jnp.concatenate([v.pull(), v.gather(0)])), ONES[:, None])
    assert "tests/test_misuse_inside_f.py" in str(e.value)


def test_errors_that_f_raises_stay_as_they_are() -> None:
    def fn(params: Any, v: cavs.Vertex) -> None:
        raise ValueError("my shape")

    with pytest.raises(ValueError, match="^my shape") as e:
        call(fn)
    assert "while F was traced for a leaf" in e.value.__notes__[0]


def test_arity_0_names_gather_all() -> None:
    with pytest.raises(
        ValueError, match="got 0; expected no call of gather, as .* arity 0, the default. .*arity=1.*, or gather_all"
    ):
        call(good, arity=0)


def test_closing_over_a_traced_value() -> None:
    def f(scale: Any) -> Any:
        def fn(params: Any, v: cavs.Vertex) -> None:
            v.scatter(v.pull() * scale)
            v.push(v.pull())

        return call(fn).sum()

    with pytest.raises(ValueError, match="F closes over a traced value.*Pass the value through params or inputs"):
        jax.jit(f)(2.0)


GATHERED = [
    ("sum", {}, "got a str; expected a function of 1 argument, (state)"),
    (lambda h, e: h, {}, "got <lambda>(h, e); expected a function of 1 argument, (state)"),
    (lambda h: h, {"edges": True}, "got <lambda>(h); expected a function of 2 arguments, (state, edge)"),
]


@pytest.mark.parametrize(("fn", "kwargs", "match"), GATHERED, ids=range(len(GATHERED)))
def test_what_is_no_function_of_a_child(fn: Any, kwargs: dict[str, Any], match: str) -> None:
    def gathering(params: Any, v: cavs.Vertex) -> None:
        v.scatter(v.gather_all(fn, **kwargs))
        v.push(v.pull())

    with pytest.raises(TypeError, match=re.escape(f"gather_all: fn: {match}")):
        call(gathering)


def test_a_push_of_text_or_with_swapped_arguments() -> None:
    with pytest.raises(TypeError, match=r"push: name: got a \w*Tracer; expected a str. Write v.push.value, 'name'."):
        call(lambda params, v: v.push("h", v.pull()))
    with pytest.raises(TypeError, match="push: value: got a str at the root; expected only arrays of numbers"):
        call(lambda params, v: v.push("h"))
