"""`cavs.memory.plan`: a batch within a memory budget, in parts and with products that run again."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import vertex_programs as vp
from cavs._memory.batch_plan import BatchPlan
from cavs._memory.buffers import Peak, peak_of
from cavs._memory.fit import Verified
from cavs._memory.search import Choice, Search, choices_for
from cavs.kernels import native_unavailable
from cavs.memory import BudgetError
from tests.odd_graphs import joined, random_binary_tree
from tests.truth import assert_close

H = 8
PROGRAM = vp.BinaryTreeLSTM(H, H, dtype=jnp.float64)
F = PROGRAM.vertex_function()
GRAPHS = joined([random_binary_tree(2 + i % 7, seed=i) for i in range(64)])
PARAMS = PROGRAM.init(jax.random.key(0))


def loss(params, batch):
    sched, x = batch
    return jnp.sum(jnp.tanh(cavs.run(F, params, sched, 0.1 * x, select=sched.roots)) ** 2)


ROWS = np.sin(np.arange(GRAPHS.num_vertices * H)).reshape(-1, H)


def collate(sample):
    """Each vertex has a row of its own."""
    starts = GRAPHS.vertex_offsets
    return sample.sched, sample.sched.pad(np.concatenate([ROWS[starts[i] : starts[i + 1]] for i in sample.numbers]))


def planned(budget=None, **how):
    return cavs.memory.plan(loss, PARAMS, GRAPHS, budget, collate=collate, **how)


@pytest.fixture(scope="module")
def whole():
    return planned()


def test_the_fastest_plan_is_the_batch_as_it_is(whole):
    assert (whole.parts, whole.keep, whole.time) == (1, "fast", 1.0)
    sched = cavs.schedule(GRAPHS)
    got = jax.jit(jax.value_and_grad(whole.loss))(PARAMS, whole.batch(GRAPHS))
    assert_close(got, jax.jit(jax.value_and_grad(loss))(PARAMS, (sched, sched.pad(ROWS))), 1e-12)
    assert 0.7 < whole.peak / whole.verify().compiled < 1.3


@pytest.mark.parametrize(("share", "parts"), [(0.3, None), ("min", None), (None, 4)])
def test_every_plan_gives_the_same_loss_and_gradients(whole, share, parts):
    plan = planned(int(share * whole.peak) if isinstance(share, float) else share, parts=parts)
    assert plan.parts > 1 and plan.peak < whole.peak and plan.time > 1 or parts
    if isinstance(share, float):
        plan = plan.fitted()
        assert plan.verify().compiled <= share * whole.peak
    want = jax.jit(jax.value_and_grad(whole.loss))(PARAMS, whole.batch(GRAPHS))
    assert_close(jax.jit(jax.value_and_grad(plan.loss))(PARAMS, plan.batch(GRAPHS)), want, 1e-12)


def test_small_steps_that_save_memory_use_no_workspace_on_a_gpu(whole, monkeypatch):
    batch, search, chosen, parts = whole._batch, whole._search, whole._chosen, planned(parts=4)
    assert whole.compiler_options == parts.compiler_options == planned("min").compiler_options == {}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    small = {"xla_gpu_cublas_fallback": False}
    found = [BatchPlan(batch, search, chosen, budget) for budget in (None, 1 << 20, "min")]
    found += [BatchPlan(batch, search, parts._chosen, None)]
    assert [plan.compiler_options for plan in found] == [{}, small, small, small]
    large = chosen._replace(peak=Peak(512 << 20, []))
    assert BatchPlan(batch, search, large, 1 << 31).compiler_options == {}


def test_less_memory_takes_more_time(whole):
    points = whole.frontier()
    peaks, times = [peak for peak, _, _ in points], [time for _, time, _ in points]
    assert len(points) > 4 and peaks == sorted(peaks, reverse=True) and times == sorted(times)
    assert peaks[-1] < whole.peak / 12
    smallest = planned("min")
    assert smallest.peak == peaks[-1] or smallest.parts == 64
    assert planned(smallest.peak).peak == smallest.peak


class Predicted:
    """512 trees of 50 vertices, whose memory is known: 1 MB and 100 MB over the parts, or a share of it."""

    def __init__(self, shares: dict[str, float]):
        self.shares = {"fast": 1.0} | shares
        self.traces = 0

    def size(self, choice: Choice) -> tuple[int, int]:
        return 25_600, 20 * choice.parts + (100 if choice.keep == "window" else 0)

    def peak(self, choice: Choice) -> Peak:
        self.traces += 1
        return Peak(int(1e6 + 1e8 * self.shares[choice.keep] / choice.parts**0.95), [])


@pytest.mark.parametrize(
    "shares", [{"least": 0.95, "window": 0.9}, {"least": 0.7, "window": 0.4}, {"least": 1.0, "window": 0.7}]
)
def test_few_choices_are_traced(shares):
    """A trace takes a sixth of a second."""
    known = Search(Predicted(shares), choices_for(512, 25_600))
    every = [known.candidate(choice) for choice in known.choices]
    for budget in np.geomspace(9.9e7, 1.4e6, 12):
        work = Predicted(shares)
        chosen = Search(work, choices_for(512, 25_600)).fastest(budget)
        best = min(c.time for c in every if c.peak.bytes <= budget)
        assert chosen is not None and chosen.peak.bytes <= budget and work.traces <= 6 and chosen.time < 1.8 * best


def test_a_keeping_that_saves_nothing_is_not_chosen():
    search = Search(Predicted({"least": 0.999, "window": 0.5}), choices_for(512, 25_600))
    whole = search.candidate(Choice(1, "fast")).peak.bytes
    assert search.fastest(0.9995 * whole).choice == (2, "fast", 1)  # a whole batch that keeps the least would fit, barely
    assert {choice.keep for _, _, choice in search.frontier()} == {"fast", "window"}


def test_a_fitted_plan_is_faster_if_xla_needs_less_than_predicted(whole, monkeypatch):
    parts = [p for p, _, _ in whole.frontier()]
    small = planned(parts[1] - 1)
    needs = {small.peak: small.peak // 2, whole.peak: small.peak - 1}
    monkeypatch.setattr(type(whole), "verify", lambda plan: Verified(plan.peak, needs.get(plan.peak, plan.peak // 2), None))
    fitted = small.fitted()
    assert fitted.time < small.time and fitted.verify().compiled <= parts[1] - 1
    monkeypatch.setattr(type(whole), "verify", lambda plan: Verified(plan.peak, plan.peak, None))
    assert small.fitted() is small


def test_batches_of_about_the_same_size_have_one_shape():
    def ones(sample):
        return sample.sched, np.ones((sample.sched.shape.vertices, H))

    plan = cavs.memory.plan(loss, PARAMS, GRAPHS, parts=4, collate=ones)
    first, second = (plan.batch(graphs) for graphs in (GRAPHS, GRAPHS[:32] + GRAPHS[:32]))
    assert jax.tree.structure(first) == jax.tree.structure(second)  # that of a schedule includes its shape
    assert [x.shape for x in jax.tree.leaves(first)] == [x.shape for x in jax.tree.leaves(second)]
    chains = cavs.from_lengths([3, 9] * 32)  # each inner vertex has one child, not two
    value = jax.jit(plan.loss)(PARAMS, plan.batch(chains))
    sched = cavs.schedule(chains)
    assert_close(value, loss(PARAMS, (sched, np.ones((sched.shape.vertices, H)))), 1e-12)
    with pytest.raises(ValueError, match="deal: count: got 4 for 63 graphs"):
        plan.batch(GRAPHS[1:])


def test_a_budget_below_the_smallest_plan_is_refused_with_its_causes():
    with pytest.raises(BudgetError, match=r"budget: got 1 KiB; expected at least .*64 parts.*largest graph has 15 vertices"):
        planned("1KiB")


def test_a_plan_prints_what_is_alive_at_the_peak(whole):
    text = str(whole)
    assert re.match(r"64 graphs, 570 vertices, parts=1, keep='fast', engine scan: predicted peak .* \(no budget\)", text), text
    assert re.search(r"KiB +f64\[\d+,8\] +while +levels", text), text


def test_an_engine_that_refuses_a_plan_is_not_offered_it(tmp_path):
    """Engine `native` runs levels: not one small tree after another."""
    graphs = joined([random_binary_tree(5 + i % 7, seed=i) for i in range(64)])
    program = vp.BinaryTreeLSTM(H, H)
    F, params = program.vertex_function(), program.init(jax.random.key(0))

    def loss(params, sched, engine):
        x = jnp.ones((sched.shape.vertices, H), jnp.float32)
        return jnp.sum(cavs.run(F, params, sched, x, select=sched.roots, engine=engine) ** 2)

    def planned(engine, **how):
        return cavs.memory.plan(functools.partial(loss, engine=engine), params, graphs, **how)

    if reason := native_unavailable():
        pytest.skip(reason)
    plan = planned("native", budget="min")
    assert plan.engines == ["native"] and 1 < plan.parts < 64 and "engine native: predicted" in str(plan)
    assert planned(None, budget="min").engines == ["scan"]  # one tree after another
    assert planned("native", budget=plan.peak).parts == plan.parts
    with pytest.raises(BudgetError, match=f"expected at least .*, for {plan.parts} parts"):
        planned("native", budget=plan.peak - 1)
    with pytest.raises(ValueError, match="engine: got 'native', but the schedule runs vertex by vertex"):
        planned("native", parts=64)
    plan.save(tmp_path / "plan.json")
    loaded = cavs.memory.load(tmp_path / "plan.json", functools.partial(loss, engine="native"), params, graphs)
    assert str(loaded) == str(plan) and loaded.verify() == plan.verify()
    whole = jax.grad(functools.partial(loss, engine="scan"))(params, cavs.schedule(graphs))
    assert_close(jax.jit(jax.grad(plan.loss))(params, plan.batch(graphs)), whole, 1e-5)


def test_misuse_says_what_to_write():
    with pytest.raises(ValueError, match=r"plan: keep: got 'all'; expected one of 'fast', 'least', 'window'"):
        planned(keep="all")
    with pytest.raises(ValueError, match=r"plan: parts: got 5 for 64 graphs; expected one of \[1, 2, 4"):
        planned(parts=5)
    with pytest.raises(TypeError, match=r"plan: graphs: got a list; expected a batch"):
        cavs.memory.plan(loss, PARAMS, [])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"plan: budget: got '2 apples'"):
        planned("2 apples")


def test_what_xla_removes_from_a_loop_needs_no_memory():
    """Values that only a loop itself reads, constants that it does not read, and equal gathers."""

    def loop(dead):
        def body(i, carry):
            x, *rest = carry
            return (jnp.sin(x) @ x, *[y + i for y in rest])

        def f(x, big):
            carry = (x, jnp.cumsum(big)) if dead else (x,)
            return jax.lax.fori_loop(0, jnp.int32(x[0, 0]) * 0 + 3, body, carry)[0].sum()

        return peak_of(jax.make_jaxpr(f)(jnp.ones((8, 8)), jnp.ones(1 << 16))).bytes

    assert loop(dead=True) == loop(dead=False)

    def gathered(again):
        def step(total, index):
            rows = table[index]
            return total + (rows.T @ rows if again else rows.T @ table[index]), None

        table = jnp.ones((512, 256))
        return peak_of(
            jax.make_jaxpr(lambda i: jax.lax.scan(step, jnp.zeros((256, 256)), i)[0])(jnp.zeros((3, 512), int))
        ).bytes

    assert gathered(again=True) == gathered(again=False)


def test_on_a_gpu_no_loop_reads_a_transposed_copy_of_a_weight(monkeypatch):
    ready = cavs.vertex_programs.TreeFC(5)
    F, params = ready.vertex_function(), ready.init(jax.random.key(0))
    sched = cavs.schedule(cavs.from_parents([[2, 2, 4, 4, -1]] * 3), scripts=False)
    x = sched.pad(np.ones((15, 5), np.float32))

    def gradient(params):
        return jax.grad(lambda p: cavs.run(F, p, sched, x, engine="scan").sum())(params)

    on_cpu = jax.make_jaxpr(gradient)(params)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jax.clear_caches()
    on_gpu = jax.make_jaxpr(gradient)(params)
    monkeypatch.undo()
    jax.clear_caches()
    turned = "f32[5,10] = transpose[permutation=(1, 0)]"
    assert turned in str(on_cpu) and turned not in str(on_gpu)
    run = lambda closed: jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *jax.tree.leaves(params))  # noqa: E731
    for a, b in zip(run(on_cpu), run(on_gpu), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
