"""Tests of the random tests: they find wrong numbers, and shrink failing cases."""

from typing import Any

import jax
import pytest

from tests import per_vertex, random_check
from tests.per_vertex import PlainVertex, _reduced as reduced
from tests.random_cases import Case, Options, script, source
from tests.random_check import check
from tests.random_programs import Block, Program, Stmt, Var
from tests.random_shrink import shrunk


def small_case() -> Case:
    """A vertex function that gathers and reduces, on chains and a star, with a harmless statement and state."""
    x, g, z = Var("x", (3,), "f"), Var("g", (3,), "f", gathered=True), Var("z", (3,), "f")
    s, m, h = Var("s", (), "t"), Var("m", (3,), "f", gathered=True), Var("h", (3,), "f", gathered=True)
    stmts = [
        Stmt(x, 'v.pull("x")', []),
        Stmt(z, "jnp.sin({0})", ["x"]),
        Stmt(g, 'v.gather(0)["a"]', []),
        Stmt(m, 'v.gather_all({f0}, reduce="mean")', [], [Block(["s"], [Stmt(s, '{0}["a"]', ["s"])], ["s"])]),
        Stmt(h, "jnp.tanh({0} + {1} * {2} + {2})", ["g", "m", "z"]),
    ]
    program = Program(
        {None: Block([], stmts, ["h", "z", "h", "z"])},
        {"a": ((3,), "f"), "b": ((3,), "f")},
        arity=1,
        params={},
        inputs={"x": ((3,), "f", -1.0, 1.0)},
        pushes=["{0}", "{0}"],
    )
    return Case(0, program, [[[], [0]], [[], [], [0, 1]]], [None] * 5, Options(way="jit"))


def test_a_case_runs_both_ways() -> None:
    assert check(small_case()).status == "ok"


def test_wrong_gathers_and_reductions_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            PlainVertex, "gather", lambda v, k: jax.tree.map(lambda x: x + 1e-6, v.children[k] if v.children else v.zero)
        )
        assert check(small_case()).what == "push differs"
    with monkeypatch.context() as patch:
        patch.setattr(per_vertex, "_reduced", lambda outs, how: reduced(outs, "max"))
        assert check(small_case()).status == "wrong"


def test_wrong_gradients_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = random_check.batched

    def wrong(case: Case, fns: dict[Any, Any], used: list[str]) -> Any:
        (gp, gx), pushes = right(case, fns, used)
        return (gp, {name: x * (1 + 1e-6) for name, x in gx.items()}), pushes

    monkeypatch.setattr(random_check, "batched", wrong)
    assert check(small_case()).what == "gradient of input differs"


def test_what_fails_is_made_small() -> None:
    """Every case with a tanh counts as failing; no case is run."""
    small = shrunk(small_case(), lambda case: "tanh" in source(case.program))
    assert sum(map(len, small.graphs)) == 1 and len(small.program.states) == 1 and small.options == Options()
    assert "gather" not in source(small.program) and len(source(small.program).splitlines()) <= 6
    assert check(small).status == "ok" and source(small.program) in script(small)
