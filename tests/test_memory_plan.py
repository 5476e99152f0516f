"""`cavs.memory.plan`: a batch within a memory budget, in as few parts as possible."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import vertex_programs as vp
from cavs._engines.choose import EngineError
from cavs._memory.fit import MOST_COMPILED, compiler_options
from cavs._memory.search import BatchGradient, fewest
from cavs.kernels import H200, Target
from cavs.memory import BudgetError
from tests.odd_graphs import joined, random_binary_tree
from tests.slow import few
from tests.truth import assert_close

H = 8
PROGRAM = vp.TreeFC(H, jnp.float64)
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
    plan = planned()
    assert plan.peak  # compiled here, before a test counts what is compiled
    return plan


@pytest.fixture
def compiled(monkeypatch):
    """The choices that are compiled."""
    found, compiled = [], BatchGradient.compiled
    monkeypatch.setattr(BatchGradient, "compiled", lambda self, choice: found.append(choice) or compiled(self, choice))
    return found


def needed(plan):
    """The bytes of temporary memory of the step, compiled here."""
    step = jax.jit(jax.value_and_grad(plan.loss), compiler_options=plan.compiler_options)
    return step.lower(PARAMS, plan.batch(GRAPHS)).compile().memory_analysis().temp_size_in_bytes


@pytest.fixture(scope="module")
def known():
    """The loss and the gradients of the batch, without a plan."""
    sched = cavs.schedule(GRAPHS)
    return jax.jit(jax.value_and_grad(loss))(PARAMS, (sched, sched.pad(ROWS)))


@pytest.mark.slow
def test_the_fastest_plan_is_the_batch_as_it_is(whole, known, compiled):
    assert (whole.parts, whole.segments, whole.time) == (1, 1, 1.0)
    assert_close(jax.jit(jax.value_and_grad(whole.loss))(PARAMS, whole.batch(GRAPHS)), known, 1e-12)
    assert planned().parts == 1 and not compiled  # nothing is compiled without a budget
    assert whole.peak == needed(whole)


@pytest.mark.parametrize("share", few(["min", 1, 0.3], 1))
def test_every_budget_is_kept_in_at_most_five_compilations(whole, known, compiled, share):
    budget = "min" if share == "min" else int(share * whole.peak)
    plan = planned(budget)
    assert len(compiled) <= MOST_COMPILED and len(set(compiled)) == len(compiled)
    assert needed(plan) == plan.peak <= (whole.peak if budget == "min" else budget)
    assert plan.verify().compiled == plan.peak
    if share == 1:
        assert plan.parts == 1 and len(compiled) == 1
    else:
        fewer = planned(parts=plan.parts // 2)
        assert fewer.peak > plan.peak and (budget == "min" or fewer.peak > budget)
    assert_close(jax.jit(jax.value_and_grad(plan.loss))(PARAMS, plan.batch(GRAPHS)), known, 1e-12)


def test_a_step_within_a_small_budget_uses_no_workspace_on_a_gpu(monkeypatch):
    monkeypatch.setattr(Target, "here", lambda: H200)
    small = {"xla_gpu_cublas_fallback": False}
    assert [compiler_options(budget) for budget in (None, 1 << 20, 512 << 20, "min")] == [{}, small, {}, small]
    assert compiler_options("min", least=1 << 30) == {}
    monkeypatch.undo()
    assert compiler_options("min") == {}


def test_less_memory_takes_more_time(whole):
    points = planned("min").frontier()
    sizes, times = [size for size, _, _ in points], [time for _, time, _ in points]
    assert len(points) > 4 and sizes == sorted(sizes, reverse=True) and times == sorted(times)
    assert sizes[-1] < whole.peak / 12 and points[0][2] == (1, 1)


@pytest.mark.parametrize("overhead", [0.8, 0.95, 1.1])
@pytest.mark.parametrize("noise", [0, 0.1])
@pytest.mark.parametrize("most", [512, 128])
def test_few_numbers_of_parts_are_compiled_and_the_fewest_are_found(overhead, noise, most):
    """1 MB, and 100 MB over the parts; an engine may refuse more than `most` parts."""
    counts = [2**i for i in range(10)]
    size = {n: int(1e6 + 1e8 / n**overhead * (1 + noise * np.sin(n))) for n in counts}
    found = []
    for share in np.linspace(0, 1, 21):
        budget = int(size[1] ** (1 - share) * size[most] ** share) + 1
        parts, known = fewest(lambda n: size[n] if n <= most else None, counts, budget)
        assert len(known) <= MOST_COMPILED and parts is not None and size[parts] <= budget
        found.append(parts == min(n for n in counts if n <= most and size[n] <= budget))
    assert np.mean(found) > 0.9
    parts, known = fewest(lambda n: size[n] if n <= most else None, counts, size[most] // 2)
    assert parts is None and len(known) <= MOST_COMPILED and min(known.values()) == size[most]


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


def test_a_plan_prints_what_was_compiled(whole):
    text = str(planned(int(0.4 * whole.peak)))
    head = r"64 graphs, 570 vertices, \d+ parts, engine scan: .* KiB of temporary memory, compiled \(budget .*\), 1.\d\d times"
    assert re.match(head, text), text
    assert re.search(r"\n +1 part +\S+ KiB +1.00\n", text), text


@pytest.mark.slow
def test_an_engine_that_refuses_a_plan_is_not_offered_it(tmp_path, known):
    """Here one that refuses parts of one graph."""

    def few(params, batch):
        if batch[0].shape.graphs < 2:
            raise EngineError("run: engine: parts are too small")
        return loss(params, batch)

    def planned(**how):
        return cavs.memory.plan(few, PARAMS, GRAPHS, collate=collate, **how)

    plan = planned(budget="min")
    assert plan.parts == 32 and planned(budget=plan.peak).parts == 32
    with pytest.raises(BudgetError, match="expected at least .*, for 32 parts"):
        planned(budget=plan.peak - 1)
    with pytest.raises(EngineError, match="parts are too small"):
        planned(parts=64)
    plan.save(tmp_path / "plan.json")
    loaded = cavs.memory.load(tmp_path / "plan.json", few, PARAMS, GRAPHS, collate=collate)
    assert (loaded.parts, loaded.segments, loaded.engines) == (32, 1, ["scan"]) and loaded.peak == plan.peak
    assert_close(jax.jit(jax.grad(loaded.loss))(PARAMS, loaded.batch(GRAPHS)), known[1], 1e-12)


def test_misuse_says_what_to_write():
    with pytest.raises(ValueError, match=r"plan: parts: got 5 for 64 graphs; expected one of \[1, 2, 4"):
        planned(parts=5)
    with pytest.raises(TypeError, match=r"plan: collate: got a int; expected a function of 1 argument, \(sample\)"):
        cavs.memory.plan(lambda params, batch: 0.0, {}, cavs.from_lengths([1, 2]), collate=1)
    with pytest.raises(TypeError, match=r"plan: batch: got a list; expected cavs.Graphs, or a pytree"):
        cavs.memory.plan(loss, PARAMS, [])
    with pytest.raises(ValueError, match=r"plan: budget: got '2 apples'"):
        planned("2 apples")
    with pytest.raises(TypeError, match=r"plan: loss: got a dict; expected a function of 2 arguments, \(params, batch\)"):
        cavs.memory.plan(PARAMS, loss, GRAPHS)  # type: ignore[arg-type]


def test_graphs_with_features_are_collated_as_by_a_loader(known):
    graphs = GRAPHS.replace(x=ROWS)
    plan = cavs.memory.plan(loss, PARAMS, graphs, parts=4)
    assert_close(jax.jit(jax.value_and_grad(plan.loss))(PARAMS, plan.batch(graphs)), known, 1e-12)


def test_parameters_may_be_numbers_and_the_loss_runs_without_jit(known):
    def scaled(params, batch):
        return params["scale"] * loss(params["of"], batch)

    params = {"of": PARAMS, "scale": 2.0}
    plan = cavs.memory.plan(scaled, params, GRAPHS, collate=collate)
    value, grads = jax.value_and_grad(plan.loss)(params, plan.batch(GRAPHS))
    assert_close((value / 2, jax.tree.map(lambda x: x / 2, grads["of"])), known, 1e-5)
    assert_close(grads["scale"], known[0], 1e-5)


def test_on_a_gpu_no_loop_reads_a_transposed_copy_of_a_weight(monkeypatch):
    ready = cavs.vertex_programs.TreeFC(5)
    F, params = ready.vertex_function(), ready.init(jax.random.key(0))
    sched = cavs.schedule(cavs.from_parents([[2, 2, 4, 4, -1]] * 3), scripts=False)
    x = sched.pad(np.ones((15, 5), np.float32))

    def gradient(params):
        return jax.grad(lambda p: cavs.run(F, p, sched, x, engine="scan").sum())(params)

    on_cpu = jax.make_jaxpr(gradient)(params)
    monkeypatch.setattr(Target, "here", lambda: H200)
    jax.clear_caches()
    on_gpu = jax.make_jaxpr(gradient)(params)
    monkeypatch.undo()
    jax.clear_caches()
    turned = "f32[5,10] = transpose[permutation=(1, 0)]"
    assert turned in str(on_cpu) and turned not in str(on_gpu)
    run = lambda closed: jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *jax.tree.leaves(params))  # noqa: E731
    for a, b in zip(run(on_cpu), run(on_gpu), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
