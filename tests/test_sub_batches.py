"""`cavs.memory.sub_batched`: the loss and gradients of a batch in parts, in the memory of a part."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from bench import graphs as generators
from bench.ours import graphs_of
from cavs import vertex_programs as vp
from cavs._feed.plan import dealt
from cavs._memory import sub_batches
from tests.odd_graphs import joined, random_binary_tree
from tests.schedule_checks import schedules
from tests.slow import few
from tests.truth import assert_close

H = 8
PROGRAM = vp.TreeFC(H)
F = PROGRAM.vertex_function()


def random_trees(count):
    return joined([random_binary_tree(2 + i % 7, seed=i) for i in range(count)])


def loss(params, batch):
    sched, x = batch
    h = cavs.run(F, params["cell"], sched, params["scale"] * x, select=sched.roots)
    return jnp.sum(jnp.tanh(h @ params["out"]) ** 2)


def with_count(params, batch):
    return loss(params, batch), {"graphs": jnp.float32(batch[0].shape.graphs)}


@pytest.fixture(scope="module")
def case():
    graphs = random_trees(12)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(graphs.num_vertices, H)).astype(np.float32)
    params = {"cell": PROGRAM.init(jax.random.key(0)), "out": jnp.asarray(rng.normal(size=(H, 3)), jnp.float32), "scale": 1.1}
    return graphs, x, params


def stacks_of(graphs, x, count):
    offsets = graphs.vertex_offsets
    parts, batches = cavs.memory.deal(graphs, count), []
    for part, (_, sched) in zip(parts, schedules(graphs, parts, shapes=[]), strict=True):
        rows = np.concatenate([x[offsets[i] : offsets[i + 1]] for i in part])
        batches.append((sched, sched.pad(rows)))
    return [jax.tree.map(lambda *xs: np.stack(xs), *batches)]  # the parts have one shape


def test_the_loss_and_the_gradients_are_those_of_the_whole_batch(case):
    graphs, x, params = case
    sched = cavs.schedule(graphs)
    value, grads = jax.value_and_grad(loss)(params, (sched, sched.pad(x)))
    total = cavs.memory.sub_batched(loss)
    got, got_grads = jax.jit(jax.value_and_grad(total))(params, stacks_of(graphs, x, 4))
    np.testing.assert_allclose(got, value, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(got_grads), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)
    np.testing.assert_allclose(total(params, stacks_of(graphs, x, 4)), value, rtol=1e-5)


def test_the_gradients_of_the_batches_and_the_aux(case):
    graphs, x, params = case
    stacks = stacks_of(graphs, x, 3)
    total = cavs.memory.sub_batched(with_count, has_aux=True)
    rows = [stack[1] for stack in stacks]

    def of_rows(rows):
        return total(params, [(stack[0], r) for stack, r in zip(stacks, rows, strict=True)])

    (_, aux), got = jax.value_and_grad(of_rows, has_aux=True)(rows)
    assert aux["graphs"] == len(graphs)
    for stack, by_rows in zip(stacks, got, strict=True):
        for i in range(by_rows.shape[0]):
            sched = jax.tree.map(lambda a, i=i: a[i], stack[0])
            expected = jax.grad(lambda r, sched=sched: loss(params, (sched, r)))(jnp.asarray(stack[1][i]))
            np.testing.assert_allclose(by_rows[i], expected, rtol=2e-4, atol=1e-5)


def test_a_batch_in_parts_takes_less_memory():
    graphs = random_trees(256)
    x = np.ones((graphs.num_vertices, H), np.float32)
    params = {"cell": PROGRAM.init(jax.random.key(0)), "out": jnp.ones((H, 3)), "scale": 1.0}

    def temporary(count):
        step = jax.jit(jax.value_and_grad(cavs.memory.sub_batched(loss)))
        return step.lower(params, stacks_of(graphs, x, count)).compile().memory_analysis().temp_size_in_bytes  # pyright: ignore[reportOptionalMemberAccess]

    assert temporary(8) < temporary(1) / 2


def test_deal_gives_each_part_as_many_graphs_and_about_as_many_vertices(case):
    graphs, _, _ = case
    parts = cavs.memory.deal(graphs, 4)
    assert sorted(parts.ravel()) == list(range(len(graphs))) and parts.shape == (4, 3)
    sizes = np.diff(graphs.vertex_offsets)
    assert np.ptp(sizes[parts].sum(1)) <= sizes.max()
    with pytest.raises(ValueError, match=r"deal: count: got 5 for 12 graphs"):
        cavs.memory.deal(graphs, 5)
    with pytest.raises(TypeError, match=r"deal: graphs: got a list; expected cavs.Graphs. Write deal\(graphs, count\)"):
        cavs.memory.deal([graphs], 1)


def test_deals_by_height_have_fewer_levels_and_about_as_many_rows():
    graphs = graphs_of(generators.sst_like(np.random.default_rng(0), 512))
    sizes, levels = np.diff(graphs.vertex_offsets), graphs._facts.levels
    parts, plain = cavs.memory.deal(graphs, 4), dealt(sizes, 4)
    assert sorted(parts.ravel()) == list(range(512)) and parts.shape == plain.shape
    assert levels[parts].max(1).sum() < 0.85 * levels[plain].max(1).sum()
    assert sizes[parts].sum(1).max() < 1.01 * sizes[plain].sum(1).max()


def test_misuse_says_what_to_write(case):
    graphs, x, params = case
    stacks = stacks_of(graphs, x, 3)
    with pytest.raises(TypeError, match=r"sub_batched: loss: got a int; expected a function of 2"):
        cavs.memory.sub_batched(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"sub_batched: has_aux: got 'no'; expected True or False"):
        cavs.memory.sub_batched(loss, has_aux="no")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"sub_batched: stacks: got a tuple|expected a list of stacked"):
        cavs.memory.sub_batched(loss)(params, ())
    with pytest.raises(TypeError, match=r"stacks: got a tuple; .* Write \[batch\] for each batch of cavs.data.Loader"):
        cavs.memory.sub_batched(loss)(params, next(iter(cavs.data.Loader(graphs.replace(x=x), 4, parts=2, steps=1))))
    for wrong, got in ((lambda params, batch: jnp.ones(2), "float64[2]"), (with_count, "tuple")):
        with pytest.raises(TypeError, match=re.escape(f"sub_batched: loss: got {got}; expected a float scalar")):
            cavs.memory.sub_batched(wrong)(params, stacks)


def test_batches_may_hold_keys():
    def noisy(params, batch):
        return jnp.sum(params * jax.random.normal(batch, (2,), jnp.float32))

    keys = jax.random.split(jax.random.key(0), 3)
    grads = jax.grad(cavs.memory.sub_batched(noisy))(jnp.ones(2, jnp.float32), [keys])
    np.testing.assert_allclose(grads, sum(jax.random.normal(key, (2,), jnp.float32) for key in keys), rtol=1e-6)


def scores(params, batch):
    """(graphs,) a loss of each graph."""
    sched, x = batch
    h = cavs.run(F, params["cell"], sched, params["scale"] * x, select=sched.roots)
    return jnp.sum(jnp.tanh(h @ params["out"]) ** 2, 1)


def chosen(params, batch):
    """The graphs whose roots have large inputs: their number differs between parts."""
    sched, x = batch
    return x[sched.roots, 0] > 0.4


def norm(params):
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(params))


# The loss in parts, and the same loss written for a whole batch, with `jax.numpy` alone.
WHOLE = {
    "mean of some": (
        lambda p, b: cavs.data.mean(scores(p, b), where=chosen(p, b)),
        lambda p, b: jnp.sum(scores(p, b) * chosen(p, b)) / jnp.sum(chosen(p, b)),
    ),
    "mean of none": (lambda p, b: cavs.data.mean(scores(p, b), where=scores(p, b) > 99), lambda p, b: 0 * norm(p)),
    "ratio of totals": (
        lambda p, b: cavs.data.total(scores(p, b) * chosen(p, b)) / cavs.data.total(scores(p, b)),
        lambda p, b: jnp.sum(scores(p, b) * chosen(p, b)) / jnp.sum(scores(p, b)),
    ),
    "square": (lambda p, b: cavs.data.total(scores(p, b)) ** 2, lambda p, b: jnp.sum(scores(p, b)) ** 2),
    "weights that depend on parameters": (
        lambda p, b: cavs.data.mean(scores(p, b)) * norm(p["out"]),
        lambda p, b: jnp.mean(scores(p, b)) * norm(p["out"]),
    ),
    "jit": (jax.jit(lambda p, b: 2 * cavs.data.mean(scores(p, b))), lambda p, b: 2 * jnp.mean(scores(p, b))),
    "of parameters": (lambda p, b: cavs.data.total(scores(p, b)) / cavs.data.total(p["out"] * 0 + 1),
                      lambda p, b: jnp.sum(scores(p, b)) / (3 * H * 3)),
}  # fmt: skip


@pytest.mark.parametrize(("name", "stacks"), few(((name, 3 if name == "mean of some" else 1) for name in WHOLE), 3))
def test_totals_and_means_are_over_the_whole_batch(case, name, stacks):
    graphs, x, params = case
    x = x.astype(np.float64)
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)
    sched = cavs.schedule(graphs)
    in_parts, whole = WHOLE[name]
    want = jax.jit(jax.value_and_grad(whole))(params, (sched, sched.pad(x)))
    (stack,) = stacks_of(graphs, x, 3)
    given = [stack] if stacks == 1 else [jax.tree.map(lambda x, i=i: x[i : i + 1], stack) for i in range(3)]
    total = cavs.memory.sub_batched(in_parts)
    assert_close(jax.jit(jax.value_and_grad(total))(params, given), want, 1e-12)
    if name == "square":
        assert_close(jax.jit(total)(params, given), want[0], 1e-12)


def test_second_derivatives_of_totals_are_those_of_the_whole_batch():
    x = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)

    def loss(total, mean):
        return lambda w, x: total(jnp.sin(w * x)) ** 3 / mean(jnp.exp(w * x)) + w**4

    parts = cavs.memory.sub_batched(loss(cavs.data.total, cavs.data.mean))
    whole = loss(jnp.sum, jnp.mean)
    got = jax.grad(jax.grad(lambda w: parts(w, [x])))(1.3)
    assert_close(got, jax.grad(jax.grad(whole))(1.3, x), 1e-12)


def test_aux_is_of_the_whole_batch_too(case):
    graphs, x, params = case

    def loss(params, batch):
        found = scores(params, batch)
        return jnp.sum(found), {"mean": cavs.data.mean(found), "graphs": batch[0].shape.graphs * jnp.ones(())}

    sched = cavs.schedule(graphs)
    value, aux = cavs.memory.sub_batched(loss, has_aux=True)(params, stacks_of(graphs, x, 3))
    want = scores(params, (sched, sched.pad(x)))
    assert_close((value, aux), (want.sum(), {"mean": want.mean(), "graphs": jnp.array(12.0)}), 1e-5)


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (
            lambda w, x: jnp.sum(w * x) + w**2,
            r"got a sum over graphs together with a term of the parameters alone .*data.total\(",
        ),
        (lambda w, x: -jax.jit(lambda w, x: w**2 - jnp.sum(w * x) / 2)(w, x), "got a sum over graphs together with a term"),
        (
            lambda p, x: cavs.data.mean(p * x) + jnp.sum(p * x),
            "got values of one part of a batch together with cavs.data.total",
        ),
        (lambda p, x: cavs.data.total(p * x / cavs.data.total(x)), "Write cavs.data.total.x. for every jnp.sum"),
        (
            lambda p, x: jax.lax.map(lambda y: cavs.data.total(p * y), x).sum(),
            r"got cavs.data.total or cavs.data.mean inside scan.*, in <lambda>.*; expected it outside of loops",
        ),
        (jax.checkpoint(lambda p, x: cavs.data.total(p * x)), r"inside (remat2|checkpoint) \(.*, in <lambda>"),
        (lambda p, x: jax.lax.cond(p > 0, cavs.data.total, jnp.sum, p * x), "inside cond"),
        (lambda p, x: jnp.mean(p * x), r"got a mean over one part .*, in <lambda>.* Write cavs.data.mean.losses."),
        (jax.checkpoint(lambda p, x: jnp.mean(p * x)), "got a mean over one part"),
        (lambda p, x: 1 - 2 * jnp.mean((p * x).astype(jnp.bfloat16)), "got a mean over one part"),
        (
            lambda p, x: jnp.sum(p * x, where=x > 0) / jnp.sum(x > 0),
            r"got a mean over one part .*total\(a\) / cavs.data.total\(b",
        ),
        (lambda p, x: jnp.sum(p * x) * (1 / x.size), "got a mean over one part"),
        (
            lambda p, x: 0.25 * jnp.sum(jnp.tile(p * x, 4)[:4]),
            r"got a mean .* only happens to be 1 / n, write weight \* cavs.data.total\(losses\)",
        ),
        (lambda p, x: -0.5 * jnp.sum((p * x).reshape(3, 1)) / 3, "got a mean over one part"),
        (lambda p, x: jnp.sum(jnp.outer(p * x, x)) / len(x), "got a mean over one part"),  # two axes, divided by rows
        (lambda p, x: jnp.mean(jnp.outer(p * x, x[:2]), 0).sum(), "got a mean over one part"),  # of rows, then a sum of columns
        (lambda p, x: jnp.maximum(jnp.mean(p * x), 0.1), r"got max of values of one part .*Write f\(cavs.data.total\(x"),
        (lambda p, x: 2 * jnp.sum(p * x) ** 2, "got (integer_pow|square) of values of one part"),
        (lambda p, x: jnp.where(p > 0, jnp.sqrt(1 + p * x @ x), 0), "got sqrt of values of one part"),
        (lambda p, x: jnp.sum(p * x) * jnp.sum(x), "got mul of values of one part"),
        (lambda p, x: p / jnp.sum(x), "got div of values of one part"),
        (lambda p, x: jax.nn.relu(jnp.sum(p * x)), "got max of values of one part"),
        (lambda p, x: jnp.max(p * x), "got reduce_max of values of one part"),
        (lambda p, x: jax.nn.logsumexp(p * x), "got (log|max|reduce_max) of values of one part"),
    ],
)
def test_totals_that_parts_cannot_add_up_are_refused(loss, text):
    with pytest.raises(TypeError, match=f"sub_batched: loss: .*{text}"):
        jax.grad(cavs.memory.sub_batched(loss))(1.0, [jnp.ones((2, 3))])


def test_means_that_are_part_of_a_sum_are_allowed():
    x = jnp.arange(12.0).reshape(2, 2, 3)
    for loss, want in [
        (lambda p, x: jnp.mean(p * x, -1).sum(), x.mean(-1).sum()),  # over the features of each graph
        (lambda p, x: cavs.data.total(jnp.mean(p * x)), x.mean((1, 2)).sum()),
        (lambda p, x: jnp.sum(p * x) / 12, x.mean()),  # the number of all elements
        (lambda p, x: 0.5 * jnp.sum(p * x), 0.5 * x.sum()),  # a part has two rows, by chance
        (lambda p, x: cavs.data.total(sum(jnp.mean(p * y) for y in x)), x.mean(-1).sum()),  # of each graph
        (lambda p, x: cavs.data.total(jnp.maximum(jnp.sum(p * x), 0)), x.sum()),
        (lambda p, x: jnp.stack([p * x, p * x]).mean(0).sum(), x.sum()),  # of two values of each number
        (lambda p, x: sum(jnp.maximum(p * y, 0) for y in x.ravel()), x.sum()),  # of single numbers
        (lambda p, x: p * sum(jnp.log(jnp.exp(y).sum()) for y in x), jax.nn.logsumexp(x, -1).sum()),  # of single rows
        (lambda p, x: p * sum(jnp.log(jnp.exp(y[0])) * jnp.sign(y[1]) ** 2 for y in x), x[..., 0].sum()),
    ]:
        assert_close(jax.value_and_grad(cavs.memory.sub_batched(loss))(1.0, [x]), (want, want), 1e-12)
    assert cavs.memory.sub_batched(lambda p, x: jnp.mean(p * x))(2.0, [x[:1]]) == 5  # one part


def test_numbers_of_parts_of_one_row_are_their_losses():
    """A function of one number of each part is no function of a sum."""
    total = cavs.memory.sub_batched(lambda p, x: (p * x - 1) ** 2 + jnp.maximum(p * x, 0) * x)
    x = jnp.arange(4.0)
    assert_close(total(2.0, [x]), jnp.sum((2 * x - 1) ** 2 + 2 * x * x), 1e-12)


def test_stacks_of_other_shapes_are_refused():
    total = cavs.memory.sub_batched(lambda w, x: cavs.data.mean(w * x))
    assert total(1.0, [jnp.ones((2, 3)), jnp.ones((5, 3))]) == 1
    with pytest.raises(ValueError, match=r"sub_batched: stacks: got sub-batches of 2 shapes; .*Loader\(..., shapes=1\)"):
        total(1.0, [jnp.ones((4, 4)), jnp.ones((1, 8))])
    for ragged in ((jnp.ones((2, 3)), jnp.ones((5, 3))), (jnp.ones((2, 3)), jnp.float32(1))):
        with pytest.raises(ValueError, match=r"stacks: got arrays of leading axes .*; expected one number of sub-batches"):
            total(1.0, [ragged])
    with pytest.raises(ValueError, match=r"Schedule.roots: got one integer .*write jax.tree.map.* for a stack"):
        cavs.memory.sub_batched(lambda w, sched: w * sched.roots.sum())(1.0, [cavs.schedule(cavs.from_lengths([3]))])
    F = cavs.VertexFunction(lambda w, v: (v.scatter(v.gather(0) + w), v.push(v.gather(0) + w))[1], state=())
    short, long = (jax.tree.map(lambda x: x[None], cavs.schedule(cavs.from_lengths([n] * 4))) for n in (1, 9))
    with pytest.raises(ValueError, match="got sub-batches of 2 shapes"):
        cavs.memory.sub_batched(lambda w, sched: cavs.data.total(cavs.run(F, w, sched)))(1.0, [short, long])


def test_effects_happen_once_in_each_part(capsys):
    def loss(w, x):
        jax.debug.print("part {}", x[0])
        total = cavs.data.total(jnp.sin(w * x))
        jax.debug.print("total {}", total > 0)
        return total**2

    jax.jit(jax.grad(cavs.memory.sub_batched(loss)))(1.0, [jnp.arange(6.0).reshape(2, 3)])
    jax.effects_barrier()
    assert sorted(capsys.readouterr().out.split("\n")) == ["", "part 0.0", "part 3.0", "total True"]


def test_a_loader_in_parts_gives_the_mean_of_its_batches():
    """As `cavs.data.Loader(..., parts=4)` deals them, and labels are dealt unevenly."""
    rng = np.random.default_rng(0)
    chains = cavs.from_lengths(rng.integers(1, 9, 16))
    labels = rng.integers(-1, 3, chains.num_vertices, np.int32)
    chains = cavs.from_lengths(np.diff(chains.vertex_offsets), label=labels, input_id=labels + 1)

    def loss(w, sched):
        return cavs.data.mean((w[sched.input_id] - sched.label) ** 2, where=sched.label >= 0)

    w = jnp.array([0.3, -1.0, 2.0, 0.7])
    (parts,) = cavs.data.Loader(chains, 16, parts=4, steps=1, seed=None)
    got = jax.value_and_grad(cavs.memory.sub_batched(loss))(w, [parts])
    want = jax.value_and_grad(lambda w: jnp.mean((w[labels + 1] - labels)[labels >= 0] ** 2))(w)
    assert_close(got, want, 1e-12)


def test_a_jitted_part_of_a_loss_may_have_constants_of_numpy() -> None:
    scale = np.array([2.0, 4.0])
    total = cavs.memory.sub_batched(lambda w, x: jax.jit(lambda y: (y.sum(0) / scale * scale[::-1]).sum())(w * x))
    x = np.arange(12.0).reshape(2, 3, 2)
    assert_close(jax.grad(total)(1.5, [x]), (x.sum((0, 1)) / scale * scale[::-1]).sum(), 1e-12)


def test_constants_of_numpy_are_inputs_inside_of_a_loss() -> None:
    graphs, inputs = joined([random_binary_tree(5, seed=n) for n in range(4)]), np.random.default_rng(0)
    F, params = PROGRAM.vertex_function(), PROGRAM.init(jax.random.key(0))
    rows = inputs.standard_normal((256, H)).astype(np.float32)

    def loss(params: dict, sched: cavs.Schedule) -> jax.Array:
        return jnp.sum(jax.tree.leaves(cavs.run(F, params, sched, rows[: sched.shape.vertices]))[0] ** 2)

    stacks = [b.tree for b in cavs.data.Loader(graphs, sub_batches.deal(graphs, 2), steps=2, shapes=1)]
    of_stacks = jax.grad(sub_batches.sub_batched(loss))(params, stacks)
    parts = [jax.tree.map(lambda x, i=i: x[i], stack) for stack in stacks for i in range(len(jax.tree.leaves(stack)[0]))]
    each = [jax.grad(loss)(params, part) for part in parts]
    assert_close(of_stacks, jax.tree.map(lambda *grads: sum(grads), *each), 1e-5)


@pytest.mark.parametrize("steps", [2, 8])
def test_parts_need_not_fill_the_last_stack(steps: int) -> None:
    """The rest of a stack is zeros, which are no part: they were added up, too."""
    graphs = cavs.from_lengths([2] * 6)
    loader = cavs.data.Loader(graphs, cavs.memory.deal(graphs, 3), steps=steps, shapes=1)
    loss = cavs.memory.sub_batched(lambda w, sched: jnp.sum(w + 0 * sched.roots))
    assert loss(1.0, [batches.tree for batches in loader]) == 6
    with pytest.raises(ValueError, match=r"Batches.tree: got batches as an argument of jax.jit, .* Write fn\(batches.tree\)"):
        jax.jit(lambda batches: batches.tree)(next(iter(loader)))


@pytest.mark.parametrize("total", [jnp.sum, cavs.data.total])
def test_gradients_of_many_parts_add_up_in_32_bits(total):
    """bfloat16 cannot count to 257."""
    loss = cavs.memory.sub_batched(lambda w, x: total(w * x))
    value, gradient = jax.value_and_grad(loss)(jnp.bfloat16(1), [jnp.ones((600, 1), jnp.bfloat16)])
    assert value.dtype == gradient.dtype == jnp.bfloat16 and (value, gradient) == (600, 600)
