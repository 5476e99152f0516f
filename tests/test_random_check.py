"""Tests of the random tests: they find wrong numbers, and shrink failing cases."""

import re
import sys
from typing import Any

import jax
import numpy as np
import pytest

import cavs
from cavs.kernels import native_unavailable
from tests import per_vertex, random_check
from tests.per_vertex import PlainVertex, _reduced as reduced
from tests.random_bulk import results
from tests.random_cases import Case, Options, random_case, script, source
from tests.random_check import check
from tests.random_compare import differences, judged
from tests.random_functions import table
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


def test_infinite_results_and_nan_are_compared_but_infinite_gradients_are_not() -> None:
    def result(push: Any, gradient: Any) -> Any:
        return ({"w": np.array(gradient)}, {}), {"a": np.array(push)}

    want = result([1.0, np.inf, np.nan], [2.0, np.nan])
    assert not differences(small_case(), result([1.0, np.inf, np.nan], [2.0, 5.0]), want)
    for push, gradient in (
        ([1, -np.inf, np.nan], [2.0, 0]),
        ([1, np.inf, 0.5], [2.0, 0]),
        ([np.nan, np.inf, np.nan], [2.0, 0]),
    ):
        assert differences(small_case(), result(np.array(push, float), gradient), want)
    assert differences(small_case(), result([1.0, np.inf, np.nan], [np.nan, 5.0]), want)


@pytest.mark.skipif(bool(native_unavailable()), reason=str(native_unavailable()))
def test_only_documented_refusals_are_no_failures() -> None:
    def sorts(p: Any, v: cavs.Vertex) -> None:
        v.scatter(jax.numpy.sort(v.gather(0)))
        v.push(v.gather(0))

    F = cavs.VertexFunction(sorts, state=jax.ShapeDtypeStruct((3,), "float32"), arity=1)
    with pytest.raises(ValueError) as refused:
        cavs.run(F, {}, cavs.schedule(cavs.from_lengths([2])), engine="native")
    assert judged(refused.value, "native").status == "refused"
    assert judged(refused.value, "scan").status == "unclear"
    assert judged(KeyError("x"), "native").status == "crashed"


def test_a_case_that_ends_its_process_or_hangs_fails_alone() -> None:
    program = """
import os, sys, time
for seed in map(int, sys.argv[1:]):
    if seed == 12: os.abort()
    if seed == 14: time.sleep(60)
    print('{"seed": %d, "status": "ok", "what": "", "engine": "scan", "how": "jit"}' % seed, flush=True)
"""
    found = {x["seed"]: x for x in results([sys.executable, "-c", program], range(25), 3, limit=3, seconds=60)}
    assert sorted(found) == list(range(25))
    bad = {seed: x["what"] for seed, x in found.items() if x["status"] != "ok"}
    assert bad == {12: "the process ended: SIGABRT", 14: "no result within 3 s"}
    assert "engine scan: 23 jit" in "\n".join(table([*found.values()]))


DRAWN = {
    "copied leaf": r'(x\d+) = (checkpoint_name\()?x\d+\["s\d"\](.*\n)*?    v\.scatter\(\{[^}]*"s\d": \1[,}]',
    "running sum": r'(x\d+) = x\d+\["(s\d)"\](.*\n)*?    (x\d+) = \1 \+ x\d+\n(.*\n)*    v\.scatter\(\{[^}]*"\2": \4',
    "leaf that is kept": r"if v.is_leaf\(\) else x\d+\)",
    "shared weight": r'x\d+ @ (p\["w\d+"\]) \+ x\d+ @ \1',
    "reduced integers": r"bitwise_(or|and|xor)\.reduce",
    "rule of a parameter or constant": r'= p\["w\d+"\]\n +x\d+ = limited_product',
    "signed zero": r"-0\.0",
    "not finite": r"jnp\.nan\b",
    "saturated": r"1e9 \*",
    "maximum into a scan": r'reduce="max"\)\n(.*\n){1,9}.*jax\.lax\.scan',
    "product over nothing": r"x\d+ @ p\[",
}


def test_the_generator_draws_what_it_once_did_not() -> None:
    """Programs are drawn, and none is run."""
    cases = [random_case(seed, engine) for engine in ("scan", "native", None) for seed in range(100)]
    texts = [source(case.program) for case in cases]
    assert not [name for name, pattern in DRAWN.items() if not any(re.search(pattern, text) for text in texts)]
    kinds = [(set(case.program.bodies), set(case.kinds)) for case in cases]
    assert any(used < names for names, used in kinds)  # a kind without vertices
    assert {case.options.way for case in cases} == {"eager", "jit", "concurrent_jit"}
    assert {case.options.loss for case in cases if case.options.parts} >= {"sum", "mean of graphs", "mean of vertices"}
    assert any(0 in shape for case in cases for shape, *_ in case.program.params.values())
