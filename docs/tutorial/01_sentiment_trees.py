# %% [markdown]
# # Sentiment trees
#
# **Goal.** Train a Tree-LSTM that reads the parse tree of a sentence and predicts its sentiment, from *very negative* to
# *very positive*. At the end it colours every phrase of a sentence that it has not seen before.
#
# Each sentence has a different tree, so no two samples have the same computation. With Cavs you write what **one vertex** of
# the tree computes. Cavs runs this function over a batch of different trees, and JAX compiles it once.
#
# You need to know a little JAX (`jax.jit`, `jax.grad`). The notebook runs in less than a minute on a CPU.

# %%
import pathlib

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
# ## 1. The data
#
# cavs comes with a small treebank of short reviews. `cavs.read_trees` reads the format of the Stanford Sentiment Treebank:
# one tree a line, in brackets, with a label from 0 to 4 at every phrase.

# %%
path = cavs.data.example("reviews.train")
print(pathlib.Path(path).read_text().splitlines()[0])

train = cavs.read_trees(path)
train

# %% [markdown]
# A `Graphs` object holds all trees as a few flat NumPy arrays. Slicing it gives fewer graphs. The vertices of a tree are
# numbered with children before parents, so the root comes last. Inner vertices have no word: their `input_id` is -1.

# %%
tree = train[0]
for vertex in range(tree.num_vertices):
    children = tree.children[tree.child_offsets[vertex] : tree.child_offsets[vertex + 1]]
    word = tree.vocab[tree.input_id[vertex]] if tree.input_id[vertex] >= 0 else ""
    print(f"vertex {vertex:2}  label {tree.label[vertex]}  {word or 'children ' + str(children.tolist())}")

# %% [markdown]
# The development set has a different vocabulary. `with_vocab` renumbers its words so that both sets share one vocabulary.
# Words that the training set lacks become -1.

# %%
dev = cavs.read_trees(cavs.data.example("reviews.dev")).with_vocab(train.vocab)
leaves = dev.height == 0
print(f"{len(dev)} trees, {leaves.sum()} words, {(dev.input_id[leaves] < 0).sum()} of them unknown")

# %% [markdown]
# This function draws a tree: its words side by side, and each phrase above its children. Section 7 uses it for predictions.

# %%
SENTIMENTS = ["very negative", "negative", "neutral", "positive", "very positive"]
COLOURS = plt.get_cmap("RdYlGn")(np.linspace(0.05, 0.95, 5))


def draw_tree(tree, labels, title, height=4):
    figure, axes = plt.subplots(figsize=(8, height), layout="constrained")
    x, y = np.zeros(tree.num_vertices), tree.height
    x[y == 0] = np.arange((y == 0).sum())
    for vertex in range(tree.num_vertices):  # children come before their parents
        children = tree.children[tree.child_offsets[vertex] : tree.child_offsets[vertex + 1]]
        x[vertex] = x[children].mean() if y[vertex] else x[vertex]
        for child in children:
            axes.plot(x[[child, vertex]], y[[child, vertex]], color="0.75")
        word, ink = tree.input_id[vertex], "white" if labels[vertex] in (0, 4) else "black"
        axes.text(x[vertex], y[vertex], labels[vertex], ha="center", va="center", color=ink, fontsize=9)
        if y[vertex] == 0:
            text = tree.vocab[word] if word >= 0 else "?"
            axes.text(x[vertex], -0.45, text, rotation=35, ha="right", va="top", rotation_mode="anchor")
    for label, (colour, name) in enumerate(zip(COLOURS, SENTIMENTS, strict=True)):
        some = labels == label
        axes.scatter(x[some], y[some], s=180, color=colour, edgecolors="0.3", zorder=2, label=f"{label} {name}")
    wrong = labels != tree.label
    axes.scatter(x[wrong], y[wrong], s=330, c="none", edgecolors="tab:blue", linewidths=1.5)
    figure.legend(ncols=5, loc="outside lower center", frameon=False)
    axes.set(title=title, ylim=(-0.3, y.max() + 0.5))
    axes.axis("off")
    plt.show()


draw_tree(train[0], train[0].label, "A tree and its labels")

# %% [markdown]
# ## 2. A batch and its schedule
#
# Take 16 trees as a batch. A vertex is ready once its children are done, so all vertices of the same height can run
# together, whichever tree they belong to. Such vertices form a *level*. `cavs.schedule` sorts the vertices of a batch into
# levels; the result is the *schedule* of the batch.
#
# `sched.plot` draws them. On the left, each coloured bar counts the vertices of one level, over all 16 trees. Grey is
# padding: the scheduler rounds sizes up, so that batches of similar size share compiled code. On the right are the
# trees of the batch in the same colours.

# %%
batch = train[:16]
sched = cavs.schedule(batch)
print(sched)
figure = sched.plot(graphs=batch)
figure.set_size_inches(9, 4)
figure

# %% [markdown]
# ## 3. The vertex function
#
# Here is the Tree-LSTM of [Tai et al. (2015)](https://arxiv.org/abs/1503.00075) for two children. The function describes
# one vertex, without a batch axis. It communicates with other vertices through four methods:
#
# - `v.gather(k)` returns the state of child `k`, and zeros if there is no such child;
# - `v.pull()` returns the input of this vertex, here the vector of its word;
# - `v.scatter(state)` sends this vertex's state to its parent;
# - `v.push(value)` sends a value out of the tree: `cavs.run` returns it.
#
# `v.is_leaf()` is a Python bool, so a plain `if` works. Only the leaves read a word.

# %%
HIDDEN, WORD, CLASSES = 64, 32, 5


def tree_lstm(params, v):
    left, right = v.gather(0), v.gather(1)
    gates = (left["h"] + right["h"]) @ params["u"] + params["b"]
    if v.is_leaf():
        gates += v.pull() @ params["w"]
    i, o, u = jnp.split(gates, 3)
    c = jax.nn.sigmoid(i) * jnp.tanh(u)
    for child in (left, right):
        c += jax.nn.sigmoid(child["h"] @ params["f"] + 1) * child["c"]
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    v.scatter({"c": c, "h": h})
    v.push(h)


F = cavs.VertexFunction(tree_lstm, state={"c": (HIDDEN,), "h": (HIDDEN,)}, arity=2)

# %% [markdown]
# The parameters are a pytree, as always in JAX. Each word has a row in a table of vectors. A small linear layer turns the
# `h` of a vertex into one score per class.


# %%
def draw(*shape):
    return jnp.asarray(rng.normal(0, 1 / np.sqrt(shape[0]), shape), jnp.float32)


params = {
    "words": 0.3 * jnp.asarray(rng.normal(size=(len(train.vocab), WORD)), jnp.float32),
    "cell": {"w": draw(WORD, 3 * HIDDEN), "u": draw(HIDDEN, 3 * HIDDEN), "b": jnp.zeros(3 * HIDDEN), "f": draw(HIDDEN, HIDDEN)},
    "out": draw(HIDDEN, CLASSES),
}

# %% [markdown]
# `cavs.run` evaluates `F` at every vertex of the batch. Its inputs and its result have one row per vertex, in the order of
# `batch`. An unknown word and an inner vertex get a vector of zeros.


# %%
def word_vectors(params, words):
    return jnp.where(words[:, None] < 0, 0, params["words"][words])


x = word_vectors(params, batch.input_id)
h = cavs.run(F, params["cell"], sched, x)
print(f"inputs {x.shape}, states {h.shape}, states of the roots {h[sched.roots].shape}")

# %% [markdown]
# ## 4. Check it against a plain loop
#
# `cavs.interpret` computes the same result one vertex at a time, in ordinary Python. It is slow, but `print`, `assert` and
# `breakpoint()` inside the vertex function work. Both results agree to rounding.

# %%
few = batch[:4]
x_few = word_vectors(params, few.input_id)
difference = cavs.interpret(F, params["cell"], few, x_few) - cavs.run(F, params["cell"], cavs.schedule(few), x_few)
print("largest difference:", float(abs(difference).max()))
assert abs(difference).max() < 1e-5

# %% [markdown]
# ## 5. A training step
#
# The treebank labels every phrase, so the loss is the mean cross-entropy over all vertices. Padding rows have the label -1
# and do not count. A schedule passes through `jax.jit` like an array, and `jax.grad` works on `cavs.run`.
#
# A jitted function prints only while JAX traces it. We use that to count how often this step is compiled.


# %%
def predict(params, sched):
    return cavs.run(F, params["cell"], sched, word_vectors(params, sched.input_id)) @ params["out"]


def loss_fn(params, sched):
    losses = optax.softmax_cross_entropy_with_integer_labels(predict(params, sched), sched.label)
    return cavs.data.mean(losses, where=sched.label >= 0)


optimizer = optax.adam(5e-3)


@jax.jit
def step(params, state, sched):
    print(f"compiling for {sched.shape.vertices} padded vertices")
    loss, grads = jax.value_and_grad(loss_fn)(params, sched)
    updates, state = optimizer.update(grads, state)
    return optax.apply_updates(params, updates), state, loss


@jax.jit
def accuracy(params, sched):
    return (predict(params, sched).argmax(-1) == sched.label)[sched.roots].mean()


# %% [markdown]
# ## 6. Train
#
# `cavs.data.Loader` draws the batches of an epoch, schedules them, and pads them to a few shapes, so that JAX compiles only
# for the first batches. The words and labels travel with the schedule as `sched.input_id` and `sched.label`. Each epoch
# leaves out the few trees that do not fill a batch. With `steps=1` the loader yields single batches, for a function under
# `jax.jit`. The third tutorial runs several steps in one call.

# %%
BATCH, EPOCHS = 32, 10
fields = ("input_id", "label")
dev_sched = cavs.schedule(dev, fields=fields)
loader = cavs.data.Loader(train, BATCH, last="drop", steps=1)
state, losses = optimizer.init(params), []
accuracies = [accuracy(params, dev_sched)]

for _ in range(EPOCHS):
    for sched in loader:
        params, state, loss = step(params, state, sched)
        losses.append(loss)
    accuracies.append(accuracy(params, dev_sched))

print(f"{len(losses)} steps\n{loader}")

# %% [markdown]
# The loss falls, and the accuracy at the roots of the development set rises. The dashed line is the accuracy of a model
# that always answers with the most frequent class.

# %%
losses, accuracies = np.array(losses), np.array(accuracies)
most_frequent = np.bincount(dev.label[dev_sched.roots]).max() / len(dev)

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
left.plot(np.arange(len(losses)) * EPOCHS / len(losses), losses)
left.set(xlabel="epoch", ylabel="training loss per vertex", ylim=(0, None))
right.plot(range(EPOCHS + 1), 100 * accuracies, "o-", color="tab:green")
right.axhline(100 * most_frequent, ls="--", color="0.5")
right.text(EPOCHS, 100 * most_frequent + 2, "most frequent class", ha="right", color="0.4")
right.set(xlabel="epoch", ylabel="root accuracy on dev (%)", ylim=(0, 100))
plt.show()

# %% [markdown]
# ## 7. Look at one sentence
#
# The rows of `predict` follow the vertices of the graphs, so the predictions of one tree are a slice. We take a sentence of
# the development set that changes its mind. The numbers and colours are predicted classes, and a blue ring marks a phrase
# whose label differs from the prediction.


# %%
def sentence(tree):
    return " ".join(tree.vocab[word] if word >= 0 else "?" for word in tree.input_id[tree.height == 0])


tree = next(tree for tree in (dev[i] for i in range(len(dev))) if "awful , but" in sentence(tree))
logits = predict(params, cavs.schedule(tree, fields=fields))
predicted = np.asarray(logits.argmax(-1))[: tree.num_vertices]
draw_tree(tree, predicted, f"Predicted: {SENTIMENTS[predicted[-1]]}. Label: {SENTIMENTS[tree.label[-1]]}.", height=5)

# %% [markdown]
# ## 8. The result
#
# The score to beat is the accuracy of always answering with the most frequent class. The assertion fails if the model did
# not learn.

# %%
assert accuracies[-1] > most_frequent + 0.15
print(
    f"{accuracies[-1]:.1%} of the unseen sentences get the right one of {CLASSES} classes; most frequent: {most_frequent:.1%}"
)

# %% [markdown]
# ## What to try next
#
# - Replace the cell: add a weight matrix for each child, a layer norm or dropout. You only change `tree_lstm`.
# - Take a ready cell: `cavs.vertex_programs.BinaryTreeLSTM(HIDDEN, WORD)` has `init(key)` and `vertex_function()`.
# - Train on your own treebank: `cavs.read` also reads CoNLL-U and JSON lines, and `cavs train` trains without any code.
# - Go on with [regression on DAGs](02_dag_regression.md), whose vertices have any number of children.
