# %% [markdown]
# # Regression on DAGs
#
# **Goal.** Predict a number from a directed acyclic graph (DAG). The graphs are small circuits whose gates compute the
# maximum, the minimum or the mean of other vertices. A network with attention over children learns to evaluate them.
#
# In a tree, each vertex has one parent and often a fixed number of children. Here a vertex has any number of parents and
# children. The order of the children has no meaning, so the result must not depend on it. You will use
#
# - `v.gather_all` for attention over any number of children,
# - `cavs.readout` to turn the vertices of a graph into one value,
# - `cavs.debug.compare` and `cavs.debug.find_nan` to look for mistakes.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import cavs

# %matplotlib inline
plt.rcParams.update({"figure.dpi": 110, "axes.spines.top": False, "axes.spines.right": False})
rng = np.random.default_rng(0)

# %% [markdown]
# ## 1. Make circuits
#
# A circuit has 4 to 8 inputs, which hold random numbers, and 4 to 12 gates. Each gate reads 2 to 4 earlier vertices, more
# often recent ones. The target is the mean value of all gates, so it depends on which vertex reads which.

# %%
KINDS = ["input", "max", "min", "mean"]
FUNCTIONS = [None, np.max, np.min, np.mean]


def random_circuit():
    inputs, gates = rng.integers(4, 9), rng.integers(4, 13)
    kind = np.concatenate([np.zeros(inputs, int), rng.integers(1, 4, gates)])
    value = np.concatenate([rng.uniform(-1, 1, inputs), np.zeros(gates)])
    edges = []
    for vertex in range(inputs, inputs + gates):
        chance = np.arange(1, vertex + 1) / np.arange(1, vertex + 1).sum()
        children = rng.choice(vertex, rng.integers(2, 5), replace=False, p=chance)
        value[vertex] = FUNCTIONS[kind[vertex]](value[children])
        edges += [(vertex, child) for child in children]
    return kind, value, edges, value[inputs:].mean()


kinds, values, edges, targets = zip(*(random_circuit() for _ in range(1280)), strict=True)
targets = np.array(targets, np.float32)

# %% [markdown]
# `cavs.from_edges` makes graphs from pairs (parent, child). The children of a vertex are the vertices that it reads.
#
# The input of a vertex is a row of `features`: its number, if it is an input of the circuit, and its kind as a one-hot
# vector. `input_id` says which row of a table a vertex reads. In the first tutorial the rows of the table were words. Here
# the table has one row per vertex.

# %%
kind, value = np.concatenate(kinds), np.concatenate(values)
features = np.column_stack([np.where(kind == 0, value, 0), np.eye(4)[kind]]).astype(np.float32)

graphs = cavs.from_edges([len(k) for k in kinds], edges, input_id=np.arange(len(features)))
train, test = graphs[:1024], graphs[1024:]
print(graphs)
print("a gate and its row:", KINDS[kind[10]], features[10])

# %% [markdown]
# On the left is the schedule of 8 circuits: all vertices of a level run together. On the right are the circuits. An edge
# leads up from a child to the gate that reads it.

# %%
figure = cavs.schedule(graphs[:8]).plot(graphs=graphs[:8])
figure.set_size_inches(9, 4)
figure

# %% [markdown]
# ## 2. A baseline without edges
#
# How good is a model without the graph? Fit a linear model to the mean of a circuit's inputs and the share of each kind
# among its gates. The score is R²: 1 is perfect, and 0 is no better than the mean target.

# %%
num_train = len(train)
y_train, y_test = targets[:num_train], targets[num_train:]


def r2(predicted):
    return float(1 - ((predicted - y_test) ** 2).mean() / y_test.var())


summary = np.array(
    [[1, v[k == 0].mean(), *((k == g).sum() / (k > 0).sum() for g in (1, 2))] for k, v in zip(kinds, values, strict=True)]
)
weights = np.linalg.lstsq(summary[:num_train], y_train, rcond=None)[0]
baseline = summary[num_train:] @ weights
print(f"R² of the baseline: {r2(baseline):.3f}")

# %% [markdown]
# ## 3. Attention over children
#
# `v.gather_all(fn, reduce="softmax")` calls `fn` on the state of every child. `fn` returns a score and a value, and the
# result is the sum of the values, weighted by the softmax of the scores over the children. The query depends on the gate,
# so a gate can learn to look at its largest child, at its smallest, or at all of them alike.

# %%
HIDDEN = 32


def gate(params, v):
    x = v.pull()
    z = x @ params["x"] + params["b"]
    if not v.is_leaf():
        query = x @ params["query"]
        z += v.gather_all(lambda child: (query @ child["key"], child["h"]), reduce="softmax") @ params["u"]
    h = jnp.tanh(z)
    v.scatter({"h": h, "key": h @ params["key"]})
    v.push(h)


F = cavs.VertexFunction(gate, state={"h": (HIDDEN,), "key": (HIDDEN,)})

# %% [markdown]
# `cavs.run` gives one row per vertex. `cavs.readout` reduces them to one row per graph: `"sum"`, `"mean"`, `"max"`, or
# `"softmax"`, which is attention over the vertices of each graph. The model needs a mean over gates alone, and the score
# lets it learn to leave out the inputs.


# %%
def draw(*shape):
    return jnp.asarray(rng.normal(0, 1 / np.sqrt(shape[0]), shape), jnp.float32)


params = {
    "cell": {
        "x": draw(5, HIDDEN),
        "b": jnp.zeros(HIDDEN),
        "query": draw(5, HIDDEN),
        "key": draw(HIDDEN, HIDDEN),
        "u": draw(HIDDEN, HIDDEN),
    },
    "score": jnp.zeros(HIDDEN),
    "out": draw(HIDDEN),
}


@jax.jit
def predict(params, sched):
    h = cavs.run(F, params["cell"], sched, jnp.asarray(features)[sched.input_id])
    return cavs.readout(h, sched, "softmax", score=h @ params["score"]) @ params["out"]


fields = ("input_id",)
test_sched = cavs.schedule(test, fields=fields)
untrained = predict(params, test_sched)
print(f"one prediction per graph: {untrained.shape}; R² before training: {r2(untrained):.3f}")

# %% [markdown]
# ## 4. Check before you train
#
# `cavs.debug.compare` evaluates a few graphs twice, batched by `cavs.run` and vertex by vertex in plain Python. It compares
# every state, push and gradient. If something differs, it names the first vertex and symbol.

# %%
few = graphs[:2]
x_few = features[few.input_id]
print(cavs.debug.compare(F, params["cell"], few, x_few))

# %% [markdown]
# `cavs.debug.find_nan` finds the first NaN of a run or of its gradient. To see it at work, here is a bad idea: a gate that
# divides its state by its length. We run it on inputs of zero, and 0 / 0 is NaN. The report names the vertex and the line.


# %%
def bad_gate(params, v):
    x = v.pull()
    total = v.gather_all(lambda child: child)
    h = x[:1] + total
    h = h / jnp.sqrt((h**2).sum())
    v.scatter(h)
    v.push(h)


print(cavs.debug.find_nan(cavs.VertexFunction(bad_gate, state=(1,)), {}, few, np.zeros_like(x_few)))
print("and in our function:", cavs.debug.find_nan(F, params["cell"], few, x_few))

# %% [markdown]
# ## 5. Train
#
# This is the loop of the first tutorial. Each graph has one target, so `with_targets` selects the targets of a batch by the
# numbers of its graphs.

# %%
BATCH, EPOCHS = 64, 15
optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, EPOCHS * num_train // BATCH))


def loss_fn(params, sched, y):
    return ((predict(params, sched) - y) ** 2).mean()


@jax.jit
def step(params, state, sched, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, sched, y)
    updates, state = optimizer.update(grads, state)
    return optax.apply_updates(params, updates), state, loss


def with_targets(sample):
    return sample.sched, y_train[sample.numbers]


loader = cavs.data.Loader(train, BATCH, collate=with_targets, steps=1)
state, losses = optimizer.init(params), []
for _ in range(EPOCHS):
    for sched, y in loader:
        params, state, loss = step(params, state, sched, y)
        losses.append(loss)

predicted = np.asarray(predict(params, test_sched))
print(f"R² on test circuits: {r2(predicted):.3f}, baseline {r2(baseline):.3f}")
print(loader)

# %% [markdown]
# Each point below is a circuit that the model has not seen. On the diagonal the prediction is exact.

# %%
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(9, 3.2), layout="constrained")
left.semilogy(np.arange(1, len(losses) + 1) * BATCH / num_train, losses)
left.set(xlabel="epoch", ylabel="mean squared error")
for axes, y, name in ((middle, baseline, "baseline"), (right, predicted, "attention")):
    axes.plot([-1, 1], [-1, 1], color="0.6", lw=1)
    axes.scatter(y_test, y, s=8, alpha=0.6)
    axes.set(
        xlabel="true value",
        ylabel="predicted value",
        title=f"{name}: R² = {r2(y):.3f}",
        xlim=(-1, 1),
        ylim=(-1, 1),
        aspect="equal",
    )

# %% [markdown]
# ## 6. What did it learn?
#
# The readout should attend to the gates and leave out the inputs. The softmax of the score shows whether it does: the bars
# are the mean weights of the vertices of each kind, relative to a uniform weight over the graph.

# %%
h = cavs.run(F, params["cell"], test_sched, features[test.input_id])
weight = np.exp(h @ params["score"])
uniform = np.asarray(cavs.readout(weight, test_sched, "mean"))
relative = weight / uniform[test_sched.graph[: test.num_vertices]]

figure, axes = plt.subplots(figsize=(5, 2.6), layout="constrained")
axes.bar(KINDS, [relative[kind[test.input_id] == k].mean() for k in range(4)], color=["0.6", "C0", "C0", "C0"])
axes.axhline(1, ls="--", color="0.4", lw=1)
axes.set(xlabel="kind of vertex", ylabel="relative weight")
plt.show()

# %% [markdown]
# ## 7. The order of children does not matter
#
# The softmax over children is a sum, so shuffling the children of every gate changes the prediction by rounding alone.

# %%
shuffled = cavs.from_edges([len(k) for k in kinds], [rng.permutation(e) for e in edges], input_id=np.arange(len(features)))[
    num_train:
]
again = predict(params, cavs.schedule(shuffled, fields=fields))
print(
    "children moved:",
    (shuffled.children != test.children).mean().round(2),
    " largest change:",
    float(abs(again - predicted).max()),
)
assert np.allclose(again, predicted, atol=1e-4)

# %% [markdown]
# ## 8. The result
#
# The edges matter: the network explains nearly all of the variance that the baseline does not explain. The assertions fail
# if the model did not learn.

# %%
assert r2(predicted) > 0.95 > r2(baseline) + 0.2
print(f"unexplained variance: baseline {1 - r2(baseline):.1%}, attention {1 - r2(predicted):.1%}")

# %% [markdown]
# ## What to try next
#
# - Replace the softmax in `gate` by `reduce="mean"` or `reduce="max"`. Which gates get worse?
# - Test on circuits twice as large. Nothing in the model depends on the size.
# - Take a ready program: `cavs.vertex_programs.DAGNN` combines attention over children with a GRU.
# - Read real circuits: `cavs.read` reads netlists in the formats `.bench` and `.blif`.
# - Go on with [tagging sequences](03_tagger.md), which look in both directions.
