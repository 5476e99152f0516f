"""Engine `persistent`: what fits, what is refused, and the kernels in Pallas' interpreter (`test_on_the_card`: on a GPU)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import cavs
from cavs import vertex_programs as vp
from cavs._engines.engine import Engine
from cavs._engines.persistent import chip, lower
from cavs._function import products
from cavs._run import adjoint
from cavs.kernels import H200, Target, persistent
from cavs.kernels._program.fit import Unfit
from cavs.kernels._program.names import Tensor, TensorRole
from cavs.kernels._program.operations import ReduceVector
from cavs.kernels.precision import PRECISIONS
from tests.lower_for_hopper import DEVICE
from tests.odd_graphs import from_children, joined, star
from tests.persistent_programs import (
    CASES,
    CHAINS,
    COPIES,
    INTERPRETED,
    INTERPRETER,
    E,
    H,
    assert_near,
    inputs_of,
    laid_out,
    plan_of,
    values,
)
from tests.slow import few, only

# One of each way through the kernels; all are tested on the card.
CASES_INTERPRETED = [
    *((name, H) for name in ("reset before the product", "layer norm", "unread state")),
    # Sizes that are no multiples of 16: padded.
    *(("BinaryTreeLSTM", 10), ("ChildSumTreeLSTM", 40), ("reciprocals", 10)),
    *(("linear", H), ("constant states", 10), ("DAGNN", H), ("EncoderDecoder", H)),
]
KEPT = [("reset before the product", H), ("BinaryTreeLSTM", 10), ("skip_connection", H)]

pytestmark = pytest.mark.usefixtures("poisoned")


@INTERPRETER
@pytest.mark.parametrize(("name", "hidden"), only(KEPT, CASES_INTERPRETED + [(name, H) for name in [*COPIES][::2]]))
def test_kernels_in_the_interpreter(name: str, hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cavs._engines.persistent.engine.LATE_ROWS", 0)
    make, graphs = (CASES | COPIES)[name]
    F, params = make(hidden)
    x = inputs_of(name, graphs, hidden)
    with jax.default_matmul_precision("highest"):
        want = values(F, params, graphs, x, "scan")
        got = values(F, params, graphs, x, INTERPRETED)
    assert_near(got, want, 1e-5)


@INTERPRETER
def test_leaves_may_scatter_what_float16_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """F bounds what other vertices of TreeFC scatter: only the leaves are searched for the scale of gathered states."""
    make, graphs = CASES["TreeFC"]
    F, params = make(H)
    x, params = inputs_of("TreeFC", graphs, H) * np.float32(1e6), {**params, "u": params["u"] * np.float32(1e-6)}
    with jax.default_matmul_precision("highest"):
        exact = values(F, params, graphs, x, "scan")
    searched, search = [], products.exponent_of
    monkeypatch.setattr(Target, "here", lambda: H200)
    monkeypatch.setattr(products, "_faster_gradient", lambda *_: True)
    monkeypatch.setattr(products.lax, "platform_dependent", lambda *args, cuda, default: cuda(*args))
    monkeypatch.setattr(
        "cavs._engines.persistent.launch.exponent_of", lambda x, least: searched.append((x.shape, least)) or search(x, least)
    )
    assert_near(values(F, params, graphs, x, laid_out(interpret=True)), exact, 2e-3)
    shape = cavs.schedule(graphs, scripts=True).shape
    assert searched == [((shape.pad + sum(shape.leaves), H), 1.0)]


@INTERPRETER
@pytest.mark.parametrize(
    ("precision", "name"),
    few([*(("f16", name) for name in ("BinaryTreeLSTM", "unread state")), ("bf16", "ChildSumTreeLSTM")], 1),
)
def test_products_of_16_bits_read_16_bits(precision: str, name: str) -> None:
    """What they read is stored so, too, and only there where nothing else reads it; sums and maths stay in float32."""
    make, graphs = CASES[name]
    F, params = make(32)
    x = inputs_of(name, graphs, 32)
    with jax.default_matmul_precision("highest"):
        want = values(F, params, graphs, x, "scan")
    with jax.default_matmul_precision("BF16_BF16_F32" if precision == "bf16" else None):
        got, plan = values(F, params, graphs, x, INTERPRETED), plan_of(F, params, x)
        programs = [lower.recurrence_of(plan, None, forward) for forward in (True, False)]
    assert_near(got, want, 2e-2 if precision == "bf16" else 2e-3)
    assert [p.precision for p in programs] == [precision, "bf16" if precision == "bf16" else "tf32"]  # cotangents have no bound
    for program in [p.program for p in programs if p.precision == precision]:
        assert program.exchanged() and program.exchanged() <= program.halves.keys()
        assert all(
            program.scratch[twin].dtype == PRECISIONS[precision].dtype for twin in program.halves if twin in program.scratch
        )


@INTERPRETER
@pytest.mark.parametrize(
    ("name", "at"), few([("unread state", [3, 0, 3, 7]), ("ChildSumTreeLSTM", [3, 0, 3, 7]), ("unread state", None)], 1)
)
def test_cotangents_of_pushes_by_number(name: str, at: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of large batches are not spread over tensors of zeros; a vertex may be asked for twice."""
    monkeypatch.setattr(adjoint, "FEW_BYTES", -1)
    make, graphs = CASES[name]
    F, params = make(H + 16)
    x, sched = inputs_of(name, graphs), cavs.schedule(graphs, scripts=True)
    rows = None if at is None else np.array(at)

    def grads(engine: str | Engine) -> Any:
        def loss(params: Any, x: Any) -> Any:
            h = cavs.run(F, params, sched, x, select=rows, engine=engine)
            return (h * np.random.default_rng(1).standard_normal(h.shape).astype(np.float32)).sum()

        return jax.grad(loss, (0, 1))(params, x)

    with jax.default_matmul_precision("highest"):
        got, want = (grads(e) for e in (INTERPRETED, "scan"))
    assert_near(got, want, 1e-5)


@INTERPRETER
def test_a_forward_alone_keeps_nothing_for_a_backward() -> None:
    make, graphs = CASES["BinaryTreeLSTM"]
    F, params = make()
    x, sched = inputs_of("BinaryTreeLSTM", graphs), cavs.schedule(graphs, scripts=True)
    plan = plan_of(F, params, x)
    kept, alone = (lower.recurrence_of(plan, None, True, keep=keep).written for keep in (True, False))
    assert {tensor.role for tensor in kept} - {tensor.role for tensor in alone} == {TensorRole.REPLACED}
    with jax.default_matmul_precision("highest"):
        assert_near(*(cavs.run(F, params, sched, x, engine=engine) for engine in (INTERPRETED, "scan")), 1e-5)


@pytest.mark.parametrize("name", CASES)
def test_every_program_is_cut_into_phases(name: str) -> None:
    """Forward and backward fit; products and sums over vectors read what was stored before the CTAs met last."""
    make, graphs = CASES[name]
    F, params = make()
    plan = plan_of(F, params, inputs_of(name, graphs))
    for recurrence in (lower.recurrence_of(plan, None, forward) for forward in (True, False)):
        phases, states = recurrence.program.phases, recurrence.part.forward.states if recurrence.forward else ()
        before = {Tensor(TensorRole.STATE, i) for i in range(len(states))}
        assert 1 <= sum(phase.barrier for phase in phases) <= 4
        stored, met = set(before), set()
        for phase in phases:
            met = stored.copy() if phase.barrier else met
            summed = {op.source.tensor for op in phase.of(ReduceVector)}
            for tensor in phase.operands() | summed:
                assert tensor not in recurrence.program.stored() or tensor in met
                assert tensor not in phase.writes() or tensor in before
            stored |= phase.writes()
            met -= phase.writes()


def refused(fn: Any, width: int = H, **kwargs: Any) -> str:
    F = cavs.VertexFunction(fn, state=(width,), **kwargs)
    params = {"u": jnp.zeros((width, width), jnp.float32)}
    plan = plan_of(F, params, np.zeros((1, width), np.float32))
    with pytest.raises(Unfit) as error:
        lower.recurrence_of(plan, None, True)
    return str(error.value)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_parameters_in_16_bits_do_not_fit(dtype: Any) -> None:
    program = vp.BinaryTreeLSTM(64, 64)
    params = jax.tree.map(lambda x: x.astype(dtype), program.init(jax.random.key(0)))
    text = cavs.explain(program.vertex_function(), params, jnp.zeros(64, dtype))
    assert "Engine persistent: no: add" in text and "float32 values are needed" in text


def test_what_does_not_fit_is_refused_by_name() -> None:
    def cell(change: Any) -> Any:
        def F(p: Any, v: cavs.Vertex) -> None:
            h = change(p, v.gather(0), v.pull())
            v.scatter(h)
            v.push(h)

        return F

    assert "sort" in refused(cell(lambda p, h, x: jnp.sort(h @ p["u"]) + x), arity=1)
    assert "divisor of the widths in F's recurrent part is 5" in refused(
        cell(lambda p, h, x: jnp.tanh(h @ p["u"] + x)), width=5, arity=1
    )
    assert "only float32 values can be summed" in refused(
        lambda p, v: (v.scatter(v.gather_all(lambda h: jnp.int32(h > 0)).astype(jnp.float32) + v.pull()), v.push(v.pull()))
    )
    assert "float32" in refused(
        cell(lambda p, h, x: (h.astype(jnp.bfloat16) + x.astype(jnp.bfloat16)).astype(h.dtype)), arity=1
    )
    assert "multiples of 16" in refused(cell(lambda p, h, x: jnp.concatenate([x[:6] * h[:6], h[6:]])), arity=1)


def test_other_widths_are_padded() -> None:
    """To what warps can share; in bf16 to multiples of 32, where sums of products are none."""
    for width, precision, unit in (
        *((10, None, 16), (40, None, 64), (48, None, 48), (150, None, 160)),
        *((48, "BF16_BF16_F32", 64), (128, "BF16_BF16_F32", 128)),
    ):
        with jax.default_matmul_precision(precision):
            F, params = CASES["LSTM"][0](width)
            plan = plan_of(F, params, inputs_of("LSTM", CHAINS))
            for forward in (True, False):
                program = lower.recurrence_of(plan, None, forward).program
                assert program.valid == width
                assert program.unit == unit or (program.unit == width and not forward)  # it sums over four gates
                assert chip.candidates(program, "bf16" if precision else "tf32", H200)
            said = cavs.explain(plan.function)
        assert (f"vectors of {width} run as {unit}" in said) == (width != unit)


def test_engine_persistent_is_refused_where_it_cannot_run() -> None:
    if persistent.unsupported(Target.here()) is None:
        pytest.skip("this machine has the GPU")
    make, graphs = CASES["LSTM"]
    F, params = make()
    sched = cavs.schedule(graphs)
    with pytest.raises(ValueError, match="engine: got 'persistent', but its kernels need.*Write engine='scan'"):
        cavs.run(F, params, sched, inputs_of("LSTM", graphs), engine="persistent")
    with pytest.raises(ValueError, match="engine: got 'persistent-interpret'"):
        cavs.run(F, params, sched, inputs_of("LSTM", graphs), engine="persistent-interpret")
    assert "persistent" in cavs.explain(F)


def constant_scatter(p: Any, v: cavs.Vertex) -> None:
    """Scatters constants, and reads children for the push: a backward launch whose only equations are of edges."""
    mixed = v.gather_all(lambda s: (jnp.max(s["b"]), (s["a"] - v.pull()) * 0.5), reduce="softmax")
    v.scatter({"a": jnp.full((H,), 0.25, jnp.float32), "b": p["w"][0]})
    v.push(jnp.tanh(mixed @ p["w"]))


@INTERPRETER
def test_what_is_of_vertices_is_not_stored_by_edge() -> None:
    """There are more edges than vertices: rows behind the tensor would be written."""
    graphs = joined([star(9), from_children([[], [0, 0]])])
    F = cavs.VertexFunction(constant_scatter, state={"a": jax.ShapeDtypeStruct((H,), jnp.float32), "b": (H,)})
    rng = np.random.default_rng(0)
    params, x = {"w": rng.standard_normal((H, H), np.float32)}, rng.standard_normal((graphs.num_vertices, H), np.float32)
    sched = cavs.schedule(graphs, scripts=True)
    run = lambda engine: jax.grad(lambda p, x: cavs.run(F, p, sched, x, engine=engine).sum(), (0, 1))(params, x)  # noqa: E731
    assert_near(run(INTERPRETED), run("scan"), 1e-5)


@INTERPRETER
def test_vmap_after_jit_and_grad_runs_engine_scan() -> None:
    make, graphs = CASES["BinaryTreeLSTM"]
    F, params = make(H)
    sched = cavs.schedule(graphs, scripts=True)
    x = sched.pad(inputs_of("BinaryTreeLSTM", graphs, H))
    both = jax.tree.map(lambda a: jnp.stack([a, 0.5 * a]), params)

    def run(engine: str | Engine) -> Any:
        value = jax.jit(lambda p, x: (cavs.run(F, p, sched, x, engine=engine) ** 2).sum())
        return jax.vmap(jax.jit(jax.value_and_grad(value, (0, 1))), (0, None))(both, x)

    with jax.default_matmul_precision("highest"):
        assert_near(run(INTERPRETED), run("scan"), 1e-5)


@INTERPRETER
def test_second_derivatives_are_those_of_engine_scan() -> None:
    F, sched = vp.ElmanRNN(H, 2).vertex_function(), cavs.schedule(cavs.from_lengths([3, 1, 2]), scripts=True)
    params = vp.ElmanRNN(H, 2).init(jax.random.key(0))
    x = sched.pad(np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32))

    def second(engine: str | Engine) -> Any:
        value = jax.jit(lambda p, x: (jnp.sin(cavs.run(F, p, sched, x, engine=engine)) ** 2).sum())
        gradient = jax.grad(value, (0, 1))
        direction = jax.tree.map(jnp.cos, (params, jnp.asarray(x)))
        return jax.jit(jax.hessian(value, 1))(params, x), jax.jvp(jax.jit(gradient), (params, x), direction)

    with jax.default_matmul_precision("highest"):
        assert_near(second(INTERPRETED), second("scan"), 1e-5)


@INTERPRETER
def test_checkpoint_runs_the_forward_launch_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX cuts what it runs again to what is read: the kernel must not be lost."""
    monkeypatch.setattr(Target, "here", lambda: H200)
    F, sched = vp.LSTM(H, E).vertex_function(), cavs.schedule(CHAINS, scripts=True)
    shapes = jax.eval_shape(vp.LSTM(H, E).init, jax.random.key(0))
    run = jax.checkpoint(lambda p, x: cavs.run(F, p, sched, x, engine="persistent"))
    x = jax.ShapeDtypeStruct((sched.shape.vertices, E), jnp.float32)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(**DEVICE))):
        traced = jax.jit(jax.grad(lambda p, x: run(p, x).sum())).trace(shapes, x)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # Both launches, the kernels that pack their weights, and the one that marks rows which the backward launch polls.
    assert text.count("stablehlo.custom_call @mosaic") == 5
