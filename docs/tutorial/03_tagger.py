# %% [markdown]
# # A tagger that looks both ways
#
# **Goal.** Give each word of a sentence a tag. A tag depends on the words before and after it, so the model reads every
# sentence in both directions. At the end, the training loop runs several steps per call.
#
# The task is small, but the model must remember many words: find the brackets that have no partner. In `a ( b ) ) (` the
# last two brackets are unmatched. Whether a closing bracket is matched depends on the words before it; for an opening
# bracket it depends on the words after it.
#
# A sequence is a graph, too: a chain, in which each word has one child, the word before it. Sentences of different length
# share a batch without being padded to the longest.

# %%
import time

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
# ## 1. Sentences and tags
#
# A stack finds the partner of each bracket. Brackets without a partner keep the tag *unmatched*.

# %%
TOKENS, TAGS = ["(", ")", "a"], ["matched", "unmatched", "letter"]


def random_sentence():
    tokens = rng.choice(3, size=rng.integers(12, 25), p=[0.4, 0.4, 0.2])
    tags = np.where(tokens == 2, 2, 1)
    stack = []
    for i, token in enumerate(tokens):
        if token == 0:
            stack.append(i)
        elif token == 1 and stack:
            tags[[stack.pop(), i]] = 0
    return tokens, tags


tokens, tags = zip(*(random_sentence() for _ in range(2304)), strict=True)
for i in range(3):
    print("".join(TOKENS[t] for t in tokens[i]))
    print("".join(".^ "[t] for t in tags[i]), "  (^ marks an unmatched bracket)" if i == 0 else "")

# %% [markdown]
# `cavs.from_lengths` makes one chain per sentence. `input_id` contains the words and `label` the tags of all sentences, one
# after another. `reversed()` reverses every edge: in the reversed chains the child of a word is the word *after* it. The
# vertices keep their numbers, so row 7 is the same word in both data sets.

# %%
chains = cavs.from_lengths([len(t) for t in tokens], input_id=np.concatenate(tokens), label=np.concatenate(tags))
train, test = chains[:2048], chains[2048:]
train_back, test_back = train.reversed(), test.reversed()
chains

# %% [markdown]
# This is the schedule of 64 sentences. Level `t` runs word `t` of all sentences with more than `t` words, so levels become
# narrower where shorter sentences have ended.

# %%
figure = cavs.schedule(train[:64]).plot()
figure.set_size_inches(6, 3.6)
figure

# %% [markdown]
# ## 2. The model
#
# `cavs.vertex_programs.LSTM` is a ready vertex program: `init(key)` gives its parameters and `vertex_function()` the function
# for `cavs.run`. One `cavs.run` goes over the chains, another one over the reversed chains. Their rows are concatenated, and
# a linear layer gives the scores of the tags.
#
# A model without the second run serves for comparison. `"backward" in params` is a Python bool, so one function covers both.

# %%
WIDTH, HIDDEN = 8, 32
lstm = cavs.vertex_programs.LSTM(hidden=HIDDEN, inputs=WIDTH)
F = lstm.vertex_function()


def init(key, directions):
    keys = iter(jax.random.split(key, 4))
    params = {"tokens": jax.random.normal(next(keys), (len(TOKENS), WIDTH))}
    for direction in directions:
        params[direction] = lstm.init(next(keys))
    params["out"] = 0.1 * jax.random.normal(next(keys), (HIDDEN * len(directions), len(TAGS)))
    return params


def predict(params, sched, back):
    x = params["tokens"][sched.input_id]
    h = cavs.run(F, params["forward"], sched, x)
    if "backward" in params:
        h = jnp.concatenate([h, cavs.run(F, params["backward"], back, x)], axis=-1)
    return h @ params["out"]


# %% [markdown]
# The loss is the mean over all words. Padding rows have the label -1 and are left out.


# %%
def loss_fn(params, sched, back):
    losses = optax.softmax_cross_entropy_with_integer_labels(predict(params, sched, back), sched.label)
    return cavs.data.mean(losses, where=sched.label >= 0)


optimizer = optax.adam(1e-2)


def update(carry, pair):
    params, state = carry
    loss, grads = jax.value_and_grad(loss_fn)(params, *pair)
    updates, state = optimizer.update(grads, state)
    return (optax.apply_updates(params, updates), state), loss


# %% [markdown]
# ## 3. A score
#
# Letters are easy, so accuracy counts brackets alone. F1 of the tag *unmatched* is the harmonic mean of precision (how many
# of the predicted ones are right) and recall (how many of the true ones are found).

# %%
fields = ("input_id", "label")
test_scheds = cavs.schedule(test, fields=fields), cavs.schedule(test_back, fields=fields)
bracket = test.label != 2
jitted_predict = jax.jit(predict)


def evaluate(params):
    predicted = np.asarray(jitted_predict(params, *test_scheds))[: test.num_vertices].argmax(-1)
    found, true = predicted == 1, test.label == 1
    f1 = 2 * (found & true).sum() / (found.sum() + true.sum())
    return {"accuracy": (predicted == test.label)[bracket].mean(), "F1": f1, "predicted": predicted}


# %% [markdown]
# ## 4. A simple loop
#
# Each step needs two schedules of the same sentences, one per direction. A loader of both data sets yields these pairs. All
# batches here fit one padded shape, so each model compiles once. With `steps=1` the loader yields single batches, for a
# function under `jax.jit`.

# %%
BATCH = 64
loader = cavs.data.Loader((train, train_back), BATCH, steps=1)
jitted_update = jax.jit(update)


def simple_epoch(carry):
    for pair in loader:
        carry, loss = jitted_update(carry, pair)
    return jax.block_until_ready(carry)


history, carries = {}, {}
for name, directions, epochs in (("one way", ["forward"], 6), ("both ways", ["forward", "backward"], 3)):
    params = init(jax.random.key(0), directions)
    carry, history[name] = (params, optimizer.init(params)), [evaluate(params)]
    for epoch in range(epochs):
        start = time.perf_counter()
        carry = simple_epoch(carry)
        seconds = time.perf_counter() - start
        history[name].append(evaluate(carry[0]))
        score = history[name][-1]
        note = " (with compilation)" if epoch == 0 else ""
        print(f"{name}, epoch {epoch}: F1 {score['F1']:.3f}, accuracy {score['accuracy']:.3f}, {seconds:.2f} s{note}")
    carries[name] = carry

# %% [markdown]
# ## 5. Several steps per call
#
# A GPU may finish such a small step before Python has started the next one. `cavs.data.step` runs all batches that a loader
# yields together in one call. A loop in XLA runs over the batches; their sentences may differ, because the structure of the
# graphs is data. The step also updates the parameters in place, and lets independent GPU kernels run at the same time. A
# loader yields 16 to 128 batches together on a GPU, and up to 8 small batches on a CPU. With `ahead=2` a thread prepares two
# dispatches ahead of the loop. We go on with the model that reads both ways.

# %%
fast_loader = cavs.data.Loader((train, train_back), BATCH, steps=8, ahead=2)
steps = cavs.data.step(update)


def fast_epoch(carry):
    for batches in fast_loader:
        carry, losses = steps(carry, batches)
    return jax.block_until_ready(carry)


carry = carries["both ways"]
for epoch in range(3, 6):
    start = time.perf_counter()
    carry = fast_epoch(carry)
    seconds = time.perf_counter() - start
    history["both ways"].append(evaluate(carry[0]))
    score = history["both ways"][-1]
    note = " (with compilation)" if epoch == 3 else ""
    print(f"both ways, epoch {epoch}: F1 {score['F1']:.3f}, accuracy {score['accuracy']:.3f}, {seconds:.2f} s{note}")

# %% [markdown]
# ## 6. Why two directions?
#
# On the left is F1 after each epoch. On the right is the final accuracy for each kind of bracket. Reading from left to right
# suffices for closing brackets. The partner of an opening bracket comes later, so the forward model can only guess.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained", width_ratios=[1, 1.2])
for n, (name, scores) in enumerate(history.items()):
    left.plot([s["F1"] for s in scores], "o-", label=name)
    correct = scores[-1]["predicted"] == test.label
    bars = right.bar(
        np.arange(2) + 0.38 * n - 0.19, [100 * correct[test.input_id == t].mean() for t in (0, 1)], 0.36, label=name
    )
    right.bar_label(bars, fmt="%.0f")
left.set(xlabel="epoch", ylabel="F1 of 'unmatched'", ylim=(0, 1.05))
left.legend(frameon=False, loc="lower right")
right.set(xticks=[0, 1], xticklabels=["opening (", "closing )"], ylabel="accuracy (%)", ylim=(0, 112))
plt.show()

# %% [markdown]
# This is the sentence of the test set in which the forward model makes most mistakes. Red brackets are unmatched: truly in
# the first row, by prediction in the other rows.

# %%
rows = {"truth": test.label} | {name: scores[-1]["predicted"] for name, scores in history.items()}
mistakes = np.add.reduceat(rows["one way"] != test.label, test.vertex_offsets[:-1])
worst = mistakes.argmax()
words = slice(test.vertex_offsets[worst], test.vertex_offsets[worst + 1])

figure, axes = plt.subplots(figsize=(8, 1.6), layout="constrained")
for y, (name, labels) in enumerate(rows.items()):
    axes.text(-1, -y, name, ha="right", va="center")
    for x, (token, label) in enumerate(zip(test.input_id[words], labels[words], strict=True)):
        colour = {0: "black", 1: "red", 2: "0.6"}[int(label)]
        axes.text(x, -y, TOKENS[token], ha="center", va="center", color=colour, family="monospace", fontsize=15, weight="bold")
axes.set(xlim=(-4, words.stop - words.start), ylim=(-2.5, 0.5))
axes.axis("off")
plt.show()

# %% [markdown]
# ## 7. The result
#
# The assertions fail if the model did not learn, or if one direction is enough.

# %%
one_way, both_ways = history["one way"][-1], history["both ways"][-1]
assert both_ways["F1"] > 0.95 > one_way["F1"] + 0.05
print(f"F1: one way {one_way['F1']:.3f}, both ways {both_ways['F1']:.3f}")

# %% [markdown]
# ## What to try next
#
# - Add a second kind of brackets, `[` and `]`, which must not cross the first.
# - Test on sentences of 100 words. The model never depends on the length.
# - Take a ready program: `cavs.vertex_programs.BiLSTMTagger` stacks several layers and adds dropout, and `CharBiLSTMTagger`
#   also reads words letter by letter.
# - Train on your own sentences without any code: `cavs train --task tag train.conllu`.
# - Run this notebook on a GPU and compare the seconds per epoch of both loops.
