"""Random vertex functions on random graphs equal the per-vertex reference, which shares no code with `cavs`.

Longer: `python -m tests.random_functions --seconds 3600`.
"""

import dataclasses

import pytest

from cavs.kernels import H200, Target, native_unavailable
from tests.lower_for_hopper import lowered
from tests.persistent_programs import INTERPRETER
from tests.random_cases import Case, functions, random_case, script
from tests.random_check import INTERPRET, batched, check
from tests.random_compare import differences
from tests.random_poison import check_poison
from tests.slow import few

ON_THE_CARD = [(engine, precision) for engine in ("auto", "persistent", "scan") for precision in ("highest", "tf32")]


def assert_equal(case: Case) -> None:
    found = check(case)
    seeds = f"{case.seed}:{case.seed + 1}"
    assert not found.failed, (
        f"{found.what}\n{found.text}\n{script(case)}\nsmaller: python -m tests.random_functions --seeds {seeds}"
    )


@pytest.mark.parametrize("seed", few([0, 1, 3, 4, 5, 6, 13, 11, 9, 24], 3))  # 24: a loss over parts
def test_engine_scan_is_the_loop_over_vertices(seed: int) -> None:
    assert_equal(random_case(seed, "scan"))


@pytest.mark.skipif(bool(native_unavailable()), reason=str(native_unavailable()))
@pytest.mark.parametrize("seed", few([0, 4, 12, 16, 29], 2))  # 29: two of three kinds have no vertices
def test_engine_native_is_the_loop_over_vertices(seed: int) -> None:
    assert_equal(random_case(seed, "native", float32=True))


@pytest.mark.skipif(bool(native_unavailable()), reason=str(native_unavailable()))
@pytest.mark.slow
def test_engine_native_with_a_kind_without_children() -> None:
    """Its arrays are empty. XLA lost the attributes of the library's call when it simplified them."""
    case = random_case(2, "native", float32=True)
    case.options.schedule.clear()
    assert "c" in case.kinds and all(k != "c" for k, of in zip(case.kinds, sum(case.graphs, []), strict=True) if of)
    assert check(case).status == "ok"


@pytest.mark.slow
def test_segments_of_levels_are_the_whole() -> None:
    """In a batch of several hundred inner vertices, for which the loop over vertices would take minutes."""
    case = random_case(101, "scan")
    copies = -(-600 // sum(bool(children) for graph in case.graphs for children in graph))
    case = dataclasses.replace(case, graphs=case.graphs * copies, kinds=case.kinds * copies)
    fns, found = functions(case.program, "float64"), []
    for schedule in ({"segments": 3}, {}):
        case.options.schedule = schedule
        found.append(batched(case, fns))
    assert not differences(case, *found)


@INTERPRETER
@pytest.mark.parametrize("seed", few(range(2), 1))
def test_engine_persistent_is_the_loop_over_vertices(seed: int) -> None:
    assert_equal(random_case(seed, INTERPRET, float32=True))


@INTERPRETER
@pytest.mark.parametrize("seed", few(range(4), 2))
def test_kernels_lower_for_hopper(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "here", lambda: H200)
    assert lowered(seed) in ("lowered", "refused", "no scripts")


@INTERPRETER
@pytest.mark.slow
def test_no_bit_depends_on_memory_that_nobody_has_written() -> None:
    assert check_poison(random_case(3, INTERPRET, float32=True)).status == "ok"


@pytest.mark.gpu
@pytest.mark.parametrize(("engine", "precision"), ON_THE_CARD)
@pytest.mark.parametrize("chunk", range(8))
def test_random_functions_on_the_card(engine: str, precision: str, chunk: int) -> None:
    for seed in range(1000 + 10 * chunk, 1010 + 10 * chunk):
        assert_equal(random_case(seed, None if engine == "auto" else engine, float32=True, precision=precision))
