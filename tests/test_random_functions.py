"""Random vertex functions on random graphs equal the per-vertex reference, which shares no code with `cavs`.

Longer: `python -m tests.random_functions --seconds 3600`.
"""

import jax
import pytest

from cavs.kernels import native_unavailable, persistent
from tests.lower_for_hopper import lowered
from tests.random_cases import Case, random_case, script
from tests.random_check import INTERPRET, check
from tests.random_poison import check_poison

INTERPRETER = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason=f"Pallas' GPU interpreter needs jax 0.11, and this is {jax.__version__}"
)
ON_THE_CARD = [(engine, precision) for engine in ("auto", "persistent", "scan") for precision in ("highest", "tf32")]


def assert_equal(case: Case) -> None:
    found = check(case)
    seeds = f"{case.seed}:{case.seed + 1}"
    assert not found.failed, (
        f"{found.what}\n{found.text}\n{script(case)}\nsmaller: python -m tests.random_functions --seeds {seeds}"
    )


@pytest.mark.parametrize("seed", [*range(11), 8092])  # 8092 calls gather_all and does not read what it returns
def test_engine_scan_is_the_loop_over_vertices(seed: int) -> None:
    assert_equal(random_case(seed, "scan"))


@pytest.mark.skipif(bool(native_unavailable()), reason=str(native_unavailable()))
@pytest.mark.parametrize("seed", [1, 6, 7, 25, 7021])  # 7021 has no vertex with children of one kind
def test_engine_native_is_the_loop_over_vertices(seed: int) -> None:
    assert_equal(random_case(seed, "native", float32=True))


@pytest.mark.skipif(bool(native_unavailable()), reason=str(native_unavailable()))
def test_engine_native_with_a_kind_without_children() -> None:
    """Its arrays are empty. XLA lost the attributes of the library's call when it simplified them."""
    case = random_case(41, "native", float32=True)
    case.options.schedule.clear()
    assert check(case).status == "ok"


@INTERPRETER
@pytest.mark.parametrize("seed", range(3))
def test_engine_persistent_is_the_loop_over_vertices(seed: int) -> None:
    assert_equal(random_case(seed, INTERPRET, float32=True))


@INTERPRETER
@pytest.mark.parametrize("seed", range(4))
def test_kernels_lower_for_hopper(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent, "supported", lambda: None)
    assert lowered(seed) in ("lowered", "refused", "no scripts")


@INTERPRETER
def test_no_bit_depends_on_memory_that_nobody_has_written() -> None:
    assert check_poison(random_case(3, INTERPRET, float32=True)).status == "ok"


@pytest.mark.gpu
@pytest.mark.parametrize(("engine", "precision"), ON_THE_CARD)
@pytest.mark.parametrize("chunk", range(8))
def test_random_functions_on_the_card(engine: str, precision: str, chunk: int) -> None:
    for seed in range(1000 + 10 * chunk, 1010 + 10 * chunk):
        assert_equal(random_case(seed, None if engine == "auto" else engine, float32=True, precision=precision))
