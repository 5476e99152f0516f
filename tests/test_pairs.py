"""Launches that do not depend on each other run in pairs, each on half of the chip, and all others one after another."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import cavs
from cavs import vertex_programs as vp
from cavs._engines.persistent import chip, launch_calls, lower
from cavs._engines.persistent.launch_calls import Half, LaunchRules
from cavs._jaxpr.equations import bind
from cavs._jaxpr.jaxprs import CALLS, all_equations, body_of, is_var
from cavs._jaxpr.ruled import call, pushed, ruled_p
from cavs._step.concurrent_jit import in_turn
from cavs._step.pairs import halves_of, has_launches, rules_of
from cavs.kernels import H200, Target
from cavs.kernels.turns import begin_p, end_p
from tests.lower_for_hopper import compile_for_hopper
from tests.persistent_programs import CASES, INTERPRETER, assert_near, inputs_of, laid_out, plan_of
from tests.slow import few

NEVER = np.iinfo(np.int32).min
ON_HALF = 100


def launch(x: Any, last: int = NEVER, cost: float | None = 12.0) -> Any:
    """Stands for a launch that takes 10 us, and `cost` on half of the chip.

    It returns 1 if a launch before it left the flag that none leaves, as this one does unless `last` is another number, and
    0 otherwise; on half of the chip, 100 more.
    """

    def on(bonus: int) -> Callable[..., list[jax.Array]]:
        def run(x: jax.Array) -> list[jax.Array]:
            counters = begin_p.bind(jnp.zeros(1, jnp.int32))
            return [counters[0] + bonus, end_p.bind(jnp.minimum(last, x)[None])]

        return run

    half = None if cost is None else Half(on(ON_HALF), cost, 10.0)
    push = lambda primals, tangents: pushed(on(0), primals, tangents)  # noqa: E731
    rules = LaunchRules(on(0), push, lambda over, dims, xs: over(on(0), tuple(dims))(*xs), halve=lambda: half)
    return call(rules, jnp.asarray(x, jnp.int32))[0]


def convolution(x: Any) -> Any:
    """Stands for a launch that needs the whole chip."""
    counters = begin_p.bind(jnp.zeros(1, jnp.int32))
    end_p.bind(jnp.minimum(NEVER, x)[None])
    return counters[0]


def both(x: Any) -> Any:
    return launch(x), launch(x)


def stacked(x: Any) -> Any:
    return launch(launch(x) * 0)


def layers(x: Any) -> Any:
    """Two layers of both directions: the second ones depend on both first ones."""
    y = sum(both(x)) * 0
    return both(x + y)


def unequal(x: Any) -> Any:
    """Pairs of which only one launch leaves the flag: the next launch sees it."""
    seen = []
    for flags in ((0, 0), (NEVER, 0), (0, NEVER)):
        a, b = (launch(x, flag) for flag in flags)
        seen.append(launch(x + 0 * (a + b), 0, None))
    return seen


@jax.custom_vjp
def custom(x: Any) -> Any:
    return launch(x)


custom.defvjp(lambda x: (custom(x), None), lambda _, ct: (ct,))


def divided(x: Any, of: Callable[[Any], Any] = both) -> Any:
    mesh = Mesh(np.array(jax.devices()[:1]), "d")
    return jax.shard_map(of, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)(x)


def in_scan(x: Any) -> Any:
    return lax.scan(lambda c, _: (c, launch(x)), None, length=2)[1]


FOUND: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "one": (launch, 0),
    "two": (both, (100, 100)),
    "three": (lambda x: [launch(x) for _ in range(3)], [100, 100, 1]),
    "four": (lambda x: [launch(x) for _ in range(4)], [100, 100, 101, 101]),
    "a chain": (stacked, 1),
    "a chain beside another": (lambda x: (launch(x), stacked(x), launch(x)), (100, 101, 101)),
    "after one that both need": (lambda x: both(launch(x) * 0), (101, 101)),
    "two layers": (layers, (101, 101)),
    "a flag of one of two": (unequal, [0, 1, 1]),
    "prepared between": (lambda x: (launch(x), launch(jnp.sin(x).astype(jnp.int32))), (100, 100)),
    "calls in calls": (lambda x: (jax.jit(launch)(x), jax.jit(jax.jit(lambda x: custom(x + 1)))(x)), (100, 100)),
    "a call of both": (lambda x: (jax.jit(both)(x), launch(x)), ((100, 100), 1)),
    "half of a call": (lambda x: (jax.jit(stacked)(x), jax.jit(both)(x)), (101, (101, 1))),
    "a convolution between": (lambda x: (launch(x), convolution(x), launch(x)), (0, 1, 1)),
    "one does not fit": (lambda x: (launch(x), launch(x, cost=None)), (0, 1)),
    "as slow": (lambda x: (launch(x), launch(x, cost=20)), (0, 1)),
    "nearly as slow": (lambda x: (launch(x), launch(x, cost=19)), (100, 100)),
    "scan": (lambda x: lax.scan(lambda c, _: (c, both(x)), None, length=2)[1], ([100, 101], [100, 101])),
    "unrolled": (lambda x: lax.scan(lambda c, _: (c, both(x)), None, length=2, unroll=2)[1], ([100, 101], [100, 101])),
    "before and after a scan": (lambda x: (launch(x), in_scan(x), launch(x)), (0, [1, 1], 1)),
    "while": (lambda x: lax.while_loop(lambda n: n < 200, lambda n: n + launch(x) + launch(x) * 0, x), 201),
    "cond": (lambda x: (launch(x), lax.cond(x == 0, both, lambda x: (x, x), x), launch(x)), (0, (101, 101), 1)),
    "checkpoint": (lambda x: (launch(x), jax.checkpoint(both)(x), launch(x)), (0, (101, 101), 1)),
    "shard_map": (lambda x: (launch(x), divided(x), launch(x)), (0, (101, 101), 1)),
    "shard_map between": (lambda x: (launch(x), launch(divided(x, jnp.sin)), launch(x)), (100, 100, 1)),
}


@pytest.mark.parametrize("name", FOUND)
def test_pairs(name: str) -> None:
    fun, want = FOUND[name]
    got = cavs.concurrent_jit(fun)(jnp.int32(0))
    jax.tree.map(np.testing.assert_array_equal, got, want, is_leaf=lambda x: isinstance(x, list) and len(x) < 3)


@pytest.mark.parametrize("seed", range(20))
def test_random_launches(seed: int) -> None:
    """A pair is two successive launches, neither in another pair, of which the second needs nothing that the first computes."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 9))
    reads = [[m for m in range(n) if rng.random() < 0.3] for n in range(count)]
    costs = [rng.choice([None, 5.0, 12.0, 20.0], p=[0.1, 0.4, 0.4, 0.1]) for _ in range(count)]

    def fun(x: Any) -> Any:
        found: list[Any] = []
        for n in range(count):
            one = lambda x, cost=costs[n]: launch(x, cost=cost)  # noqa: E731
            found.append((jax.jit(one) if n % 2 else one)(x + 0 * sum(found[m] for m in reads[n])))
        return found

    needed: list[set[int]] = []
    for of in reads:
        needed.append({*of}.union(*(needed[m] for m in of)))
    paired: set[int] = set()
    for n in range(count - 1):
        fit = [c is not None and c < 20 for c in costs[n : n + 2]]
        if n not in paired and all(fit) and n not in needed[n + 1]:
            paired |= {n, n + 1}
    got = [int(x) for x in cavs.concurrent_jit(fun)(jnp.int32(0))]
    assert [x >= ON_HALF for x in got] == [n in paired for n in range(count)]


def bilstm(hidden: int, layers: int = 1) -> tuple[Callable[[Any], Any], Any]:
    """The gradient of a BiLSTM over some chains, and its parameters."""
    program = vp.BiLSTM(hidden, 8, layers=layers)
    chains = cavs.from_lengths([5, 1, 9])
    scheds = [cavs.schedule(g, scripts=True) for g in (chains, chains.reversed())]
    x = np.random.default_rng(0).standard_normal((scheds[0].shape.vertices, 8)).astype(np.float32)
    return jax.value_and_grad(lambda params: (program.run(params, *scheds, x) ** 2).mean()), program.init(jax.random.key(0))


def halves_in(fun: Callable[..., Any], *args: Any) -> list[Half | None]:
    """How the launches of a function run in pairs, if they do."""
    traced: Any = jax.make_jaxpr(fun)(*args)
    return halves_of(traced.jaxpr)


def kernels_in(jaxpr: Any) -> Iterator[Any]:
    """Yields the name and the number of thread blocks of each launch. No thread block of other kernels waits."""
    for eqn in all_equations(jaxpr.eqns):
        if "meshes" in eqn.params and eqn.params["name"] not in ("cavs_pack", "cavs_unwritten"):
            yield eqn.params["name"], math.prod(math.prod(m.grid) * math.prod(m.cluster) for m in eqn.params["meshes"])


def evaluated(jaxpr: Any, args: Any, found: list[Any], on: Callable[[Any], bool], look: Callable[..., Any]) -> list[Any]:
    """Evaluates a jaxpr, given its constants and arguments, and adds `look(eqn, operands)` of each equation that is `on`."""
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))
    for eqn in jaxpr.eqns:
        operands = [env[x] if is_var(x) else x.val for x in eqn.invars]
        found += [look(eqn, operands)] if on(eqn) else []
        if eqn.primitive.name in CALLS and has_launches([eqn]) and not on(eqn):
            body, consts = body_of(eqn)
            outs = evaluated(body, [*consts, *operands], found, on, look)
        else:
            outs = bind(eqn, operands)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [env[x] if is_var(x) else x.val for x in jaxpr.outvars]


def operands_on_half(eqn: Any, operands: list[jax.Array]) -> tuple[str, list[jax.Array]]:
    """What the kernel of a launch on half of the chip is given: how many arrays of each sort, and the arrays."""
    half, found = rules_of(eqn).halve(), []
    closed = jax.make_jaxpr(half.run)(*operands)
    is_call = lambda eqn: eqn.primitive.name == "custom_vmap_call"  # noqa: E731
    evaluated(
        closed.jaxpr, [*closed.consts, *operands], found, is_call, lambda eqn, operands: (str(eqn.params["in_tree"]), operands)
    )
    (given,) = found
    return given


def tangents_of(xs: Any) -> Any:
    return tuple(jnp.ones_like(x) if x.dtype.kind == "f" else np.zeros(x.shape, jax.dtypes.float0) for x in xs)


@INTERPRETER
@pytest.mark.parametrize(("hidden", "layers"), few([(64, 3), (64, 1), (512, 1), (1024, 1)], 2))
def test_both_directions_share_the_chip(hidden: int, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, and in a step in a loop."""
    monkeypatch.setattr(Target, "here", lambda: H200)
    step, params = bilstm(hidden, layers)
    many = lambda p: lax.scan(lambda p, _: (step(p)[1], None), p, length=4, unroll=2)[0]  # noqa: E731
    for fun in (step, many):
        found = [*kernels_in(jax.make_jaxpr(in_turn(fun))(params).jaxpr)]
        assert [name for name, _ in found] == ["cavs_forward"] * 2 * layers + ["cavs_backward"] * 2 * layers
        blocks = [n for _, n in found]
        assert all(a + b <= H200.multiprocessors for a, b in zip(blocks[::2], blocks[1::2], strict=True))
    alone = [n for _, n in kernels_in(jax.make_jaxpr(step)(params).jaxpr)]
    assert max(alone) > H200.multiprocessors // 2  # one after another, each has the whole chip


@INTERPRETER
def test_stacked_layers_run_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "here", lambda: H200)
    program, sched = vp.LSTM(64, 64), cavs.schedule(cavs.from_lengths([5, 1, 9]), scripts=True)
    F, params = program.vertex_function(), program.init(jax.random.key(0))

    def loss(params: Any, x: Any) -> Any:
        for _ in range(3):
            x = cavs.run(F, params, sched, x)
        return (x**2).sum()

    x = jnp.ones((sched.shape.vertices, 64), jnp.float32)
    assert halves_in(jax.grad(loss), params, x) == [None] * 6
    plain, ordered = (jax.make_jaxpr(fun)(params, x) for fun in (jax.grad(loss), in_turn(jax.grad(loss))))
    assert [*kernels_in(plain.jaxpr)] == [*kernels_in(ordered.jaxpr)]


@pytest.mark.parametrize("name", few(CASES, 8))
@pytest.mark.parametrize("multiprocessors", few([132, 114, 78, 3], 1))
def test_two_halves_are_no_more_than_the_chip(name: str, multiprocessors: int) -> None:
    target = dataclasses.replace(H200, multiprocessors=multiprocessors)
    make, graphs = CASES[name]
    shape, found = cavs.schedule(graphs, scripts=True).shape, 0
    for hidden in (16, 256, 1024):
        F, params = make(hidden)
        plan = plan_of(F, params, inputs_of(name, graphs, hidden))
        for kind, part in plan.inner.items():
            for forward in (True, False) if part.recurrent.eqns else ():
                made = lower.recurrence_of(plan, kind, forward)
                config = chip.half_layout(made, chip.LaunchOptions(target), shape)
                if config is not None:
                    found += 1
                    assert 2 * chip.num_thread_blocks(made.program, config) <= multiprocessors
                    assert config.split == 1 and not config.wide
    assert found or multiprocessors == 3


def test_layouts_given_by_hand_are_halved_only_if_they_fit() -> None:
    make, graphs = CASES["LSTM"]
    F, params = make(512)
    made = lower.recurrence_of(plan_of(F, params, inputs_of("LSTM", graphs, 512)), None, True)
    shape = cavs.schedule(graphs, scripts=True).shape
    for hb, groups, split, fits in ((8, 1, 1, True), (8, 2, 1, False), (16, 1, 2, False)):
        fields = {"hb": hb, "groups": groups, "split": split}
        narrow = lambda level, forward, config, fields=fields: dataclasses.replace(config, **fields)  # noqa: E731
        how = chip.LaunchOptions(H200, layouts=chip.Layouts(narrow))
        assert (chip.half_layout(made, how, shape) is not None) == fits


@INTERPRETER
@pytest.mark.slow
def test_values_of_launches_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another layout, the same values and gradients, also of the launches that follow both."""
    make, graphs = CASES["LSTM"]
    F, params = make()
    x, engine = inputs_of("LSTM", graphs), laid_out(interpret=True)
    scheds = [cavs.schedule(g, scripts=True) for g in (graphs, graphs.reversed())]

    half = lambda *args: dataclasses.replace(chip.configure(*args), rows=16)  # noqa: E731
    monkeypatch.setattr(launch_calls, "half_layout", half)

    def loss(params: Any, x: Any, engine: Any) -> Any:
        for _ in range(2):
            y = [cavs.run(F, params, sched, x, engine=engine) for sched in scheds]
            x = (y[0] * jnp.sin(y[1]))[:, : x.shape[1]]
        return (x**2).sum()

    with jax.default_matmul_precision("highest"):
        want = jax.value_and_grad(loss, (0, 1))(params, x, "scan")
        step = lambda p, x: jax.value_and_grad(loss, (0, 1))(p, x, engine)  # noqa: E731
        halves = halves_in(step, params, x)
        assert len(halves) == 8 and all(halves)
        assert_near(cavs.concurrent_jit(step)(params, x), want, 1e-5)


@INTERPRETER
@pytest.mark.parametrize(
    ("name", "precision"), few([("ElmanRNN", None), ("LSTM", None), ("LSTM", "highest"), ("BinaryTreeLSTM", None)], 1)
)
def test_a_half_that_polls_gets_what_a_launch_that_polls_gets(
    name: str, precision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the launch on the whole chip has barriers: rows to be written are marked, and awaited rows hold nothing else."""
    make, graphs = CASES[name]
    x, sched = inputs_of(name, graphs), cavs.schedule(graphs, scripts=True)
    polling = lambda made, how, shape: dataclasses.replace(chip.configure(made, how, shape), dataflow=True)  # noqa: E731
    monkeypatch.setattr(launch_calls, "half_layout", polling)
    found = []
    for flows in (True, False):
        narrow = lambda level, forward, config, flows=flows: dataclasses.replace(config, dataflow=flows)  # noqa: E731
        with jax.default_matmul_precision(precision):
            F, params = make()
            loss = lambda p: (cavs.run(F, p, sched, x, engine=laid_out(narrow, interpret=True)) ** 2).sum()  # noqa: B023, E731
            both = lambda p: jax.grad(lambda two: sum(map(loss, two)))((p, p))  # noqa: B023, E731
            closed, operands = jax.make_jaxpr(both)(params), []
            evaluated(closed.jaxpr, [*closed.consts, *jax.tree.leaves(params)], operands, rules_of, operands_on_half)
        bits = lambda arrays: sorted((x.dtype.str, x.shape, x.tobytes()) for x in map(np.asarray, arrays))  # noqa: E731
        found.append([(sorts, bits(arrays)) for sorts, arrays in operands])
    assert len(found[0]) == 4 and found[0] == found[1]


@INTERPRETER
def test_a_launch_is_neither_batched_nor_differentiated(monkeypatch: pytest.MonkeyPatch) -> None:
    """On half of the chip neither: `cavs.run` replaces it by another engine before."""
    monkeypatch.setattr(Target, "here", lambda: H200)
    step, params = bilstm(64)
    jaxpr: Any = jax.make_jaxpr(step)(params).jaxpr
    eqns = [e for e in all_equations(jaxpr.eqns) if e.primitive is ruled_p and isinstance(e.params["rules"], LaunchRules)]
    assert len(eqns) == 4
    for eqn in eqns:
        args = [jnp.zeros(x.aval.shape, x.aval.dtype) for x in eqn.invars]
        half = eqn.params["rules"].halve()
        for run in (lambda *xs, rules=eqn.params["rules"]: call(rules, *xs), half.run):
            with pytest.raises(NotImplementedError, match="jax.vmap around a launch; cavs.run batches by engine scan"):
                jax.vmap(run)(*(x[None] for x in args))
            with pytest.raises(TypeError, match='"persistent" has no second derivative. Write cavs.run.*engine="scan"'):
                jax.eval_shape(lambda *xs, run=run: jax.jvp(run, xs, tangents_of(xs)), *args)


def test_what_can_run_at_the_same_time_on_hopper(tmp_path: Any) -> None:
    """Of three independent launches the first two, forward and backward: neither waits for memory that the other one uses."""
    found = compile_for_hopper("tests.pairs_for_hopper", str(tmp_path))
    pairs = found["at the same time"]
    assert found["launches"] == 6 and len(pairs) == 2 and len({n for pair in pairs for n in pair}) == 4, found


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "batch"), [(64, 3), (256, 1), (256, 64), (512, 16)])
def test_a_tagger_on_the_card(hidden: int, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients are those of engine scan; twice the same bits."""
    program = vp.BiLSTMTagger(9, hidden, 64, hidden, layers=2)
    params = program.init(jax.random.key(0))
    chains = cavs.from_lengths(np.random.default_rng(0).integers(5, 60, batch))
    scheds = [cavs.schedule(g) for g in (chains, chains.reversed())]
    x = jax.random.normal(jax.random.key(1), (scheds[0].shape.vertices, 64), jnp.float32)
    step = lambda p, x: jax.value_and_grad(lambda p, x: (program.run(p, *scheds, x) ** 2).mean(), (0, 1))(p, x)  # noqa: E731
    halves = halves_in(step, params, x)
    assert len(halves) == 8 and all(halves)
    jitted = cavs.concurrent_jit(step)
    got, again = (jitted(params, x) for _ in range(2))
    run = cavs.run
    monkeypatch.setattr(cavs, "run", lambda *args, **options: run(*args, **options | {"engine": "scan"}))
    with jax.default_matmul_precision("highest"):
        want = jax.jit(lambda p, x: step(p, x))(params, x)
    assert_near(got, want, 5e-3)
    jax.tree.map(np.testing.assert_array_equal, got, again)
