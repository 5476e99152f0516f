"""Random vertex functions on random graphs equal the per-vertex reference, which shares no code with `cavs`.

Longer: `python -m tests.random_functions --seconds 3600`.
"""

from typing import Any

import jax
import pytest

from tests import per_vertex, random_check
from tests.per_vertex import PlainVertex, _reduced as reduced
from tests.random_cases import Case, Options, random_case, script, source
from tests.random_check import INTERPRET, check
from tests.random_functions import allowed
from tests.random_programs import Block, Program, Stmt, Var
from tests.random_shrink import shrunk

INTERPRETER = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason=f"Pallas' GPU interpreter needs jax 0.11, and this is {jax.__version__}"
)
ON_THE_CARD = [(engine, precision) for engine in ("auto", "persistent", "scan") for precision in ("highest", "tf32")]


def assert_equal(case: Case) -> None:
    found = check(case)
    assert not found.failed and (found.status != "refused" or case.options.engine != "scan" or allowed(found)), (
        f"{found.what}\n{found.text}\n{script(case)}\nsmaller: python -m tests.random_functions --seed {case.seed}"
    )


@pytest.mark.parametrize("seed", range(14))
def test_engine_scan_is_the_loop_over_vertices(seed: int) -> None:
    assert_equal(random_case(seed, "scan"))


@INTERPRETER
@pytest.mark.parametrize("seed", range(6))
def test_engine_persistent_is_the_loop_over_vertices(seed: int) -> None:
    assert_equal(random_case(seed, INTERPRET, float32=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("engine", "precision"), ON_THE_CARD)
@pytest.mark.parametrize("chunk", range(8))
def test_random_functions_on_the_card(engine: str, precision: str, chunk: int) -> None:
    for seed in range(1000 + 10 * chunk, 1010 + 10 * chunk):
        assert_equal(random_case(seed, None if engine == "auto" else engine, float32=True, precision=precision))


def small_case() -> Case:
    """A vertex function that gathers and reduces, on chains and a star, with a statement and a state that do no harm."""
    x, g, z = Var("x", (3,), "f"), Var("g", (3,), "f", gathered=True), Var("z", (3,), "f")
    s, m, h = Var("s", (), "t"), Var("m", (3,), "f", gathered=True), Var("h", (3,), "f", gathered=True)
    stmts = [
        Stmt(x, 'v.pull("x")', []),
        Stmt(z, "jnp.sin({0})", ["x"]),
        Stmt(g, 'v.gather(0)["a"]', []),
        Stmt(m, 'v.gather_all({f0}, reduce="mean")', [], [Block(["s"], [Stmt(s, '{0}["a"]', ["s"])], ["s"])]),
        Stmt(h, "jnp.tanh({0} + {1} * {2})", ["g", "m", "z"]),
    ]
    program = Program(
        {None: Block([], stmts, ["h", "z", "h", "z"])},
        {"a": ((3,), "f"), "b": ((3,), "f")},
        arity=1,
        params={},
        inputs={"x": ((3,), "f", -1.0, 1.0)},
        pushes=["{0}", "{0}"],
    )
    return Case(0, program, [[[], [0], [1]], [[]], [[], [], [0, 1]]], [None] * 7, Options(jit=True, at=True))


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


def test_wrong_gradients_are_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    right = random_check.batched

    def wrong(case: Case, fns: dict[Any, Any], used: list[str]) -> Any:
        (gp, gx), pushes = right(case, fns, used)
        return (gp, {name: x * (1 + 1e-6 * ("tanh" in source(case.program))) for name, x in gx.items()}), pushes

    monkeypatch.setattr(random_check, "batched", wrong)
    case = small_case()
    found = check(case)
    assert found.what == "gradient of input differs"
    small = shrunk(case, lambda c: check(c).what == found.what, 60)
    assert sum(map(len, small.graphs)) == 1 and len(small.program.states) == 1
    assert small.options == Options() and "gather" not in source(small.program)
    assert "def F(p, v):" in script(small) and "rerun" in script(small)
