"""Peer: plain JAX: `lax.scan` over levels padded to the widest one, gradients by `jax.grad`.

    pip install jax

What a JAX user writes without a library for dynamic nets: leaves (or all words) in one product, then a scan over levels that
writes its states into one table, every level padded to the batch's widest. Sizes are rounded up so that batches share compiled
code. Timed: levels from the raw arrays, padding, transfer, forward, backward, SGD. Steps are dispatched asynchronously, like
those of Cavs.
"""

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import numpy as np

from bench.peers.levels import chain_levels, tree_levels

NO_WORD = 1 << 30  # beyond the vocabulary: reads the last row and is never written


class JaxPeer:
    """Trains by the jitted `train`. `forward` is its first argument; `schedule` prepares the arrays of a batch."""

    def __init__(self, forward, params):
        self._p = {k: jnp.array(v) for k, v in params.items()}
        self._step = jax.jit(functools.partial(train, forward), donate_argnums=0)

    def run(self, batches, lr=0.05):
        losses = []
        for batch in batches:
            self._p, loss = self._step(self._p, self.schedule(batch), lr)
            losses.append(loss)
        jax.block_until_ready((self._p, losses))
        return [float(x) for x in jax.device_get(losses)]

    def step(self, batch, lr=0.05):
        return self.run([batch], lr)[0]

    def compile(self, batches, lr=0.05):
        """Compiles the shapes of these batches in parallel."""
        by_shape = {tuple(x.shape for x in jax.tree.leaves(b)): b for b in map(self.schedule, batches)}
        lowered = [self._step.lower(self._p, b, lr) for b in by_shape.values()]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda x: x.compile(), lowered))

    def compilations(self):
        return self._step._cache_size()


class JaxScan(JaxPeer):
    """One model, trained by a jitted step over padded levels."""

    def __init__(self, cell, params, threads=2, device="cpu"):
        super().__init__({"tree_lstm": _tree_lstm, "tree_fc": _tree_fc, "lstm": _lstm}[cell], params)
        self.schedule = pad_chains if cell == "lstm" else pad_levels

    def params(self):
        return {k: np.asarray(v) for k, v in self._p.items()}


def rounded(n, ratio=1.25):
    """`n` rounded up to a geometric ladder of multiples of 4."""
    size = 4
    while size < n:
        size = max(size + 4, int(size * ratio) // 4 * 4)
    return size


def pad_levels(batch):
    """Children of every level, padded to the widest; words padded by one out of the vocabulary."""
    lv = tree_levels(batch)
    leaves, width, levels = rounded(len(lv.words)), rounded(max(lv.sizes, default=1)), rounded(len(lv.sizes))
    sizes = np.asarray(lv.sizes, np.int64)
    starts = np.cumsum(sizes) - sizes
    level = np.repeat(np.arange(len(sizes)), sizes)
    column = np.arange(len(lv.left)) - starts[level]
    row = np.arange(leaves + levels * width)  # of the table: leaves, then level after level
    real = np.concatenate([row[: len(lv.words)], leaves + level * width + column])
    zero_row = leaves + levels * width  # a row of zeros
    kids = np.full((2, levels, width), zero_row, np.int32)
    kids[0, level, column], kids[1, level, column] = real[lv.left], real[lv.right]
    words = np.full(leaves, NO_WORD, np.int32)
    words[: len(lv.words)] = lv.words
    return {"words": words, "kids": kids, "read": real[lv.roots].astype(np.int32), "labels": lv.labels.astype(np.int32)}


def pad_chains(batch):
    """Time-major words of every chain, padded to the longest; `read` picks the real positions."""
    lv = chain_levels(batch)
    steps, width, total = rounded(len(lv.sizes)), lv.sizes[0], len(lv.words)
    words = np.full((steps, width), NO_WORD, np.int32)
    real = np.arange(width) < np.array(lv.sizes)[:, None]
    words[: len(lv.sizes)][real] = lv.words
    read, labels = np.zeros(rounded(total), np.int32), np.full(rounded(total), -1, np.int32)
    read[:total], labels[:total] = np.flatnonzero(real), lv.labels
    return {"words": words, "read": read, "labels": labels}


def train(forward, params, batch, lr):
    """Takes a training step. `forward` maps weights, the words' vectors and the batch to the states that have labels."""
    x = params["embed"].at[batch["words"]].get(mode="clip")

    def loss(weights, x):
        h = forward(weights, x, batch)
        log_p = jax.nn.log_softmax(h @ weights["out_w"] + weights["out_b"])
        real = batch["labels"] >= 0
        of_label = jnp.take_along_axis(log_p, batch["labels"][:, None], 1, mode="clip")[:, 0]
        return -jnp.where(real, of_label, 0).sum() / real.sum()

    weights = {k: v for k, v in params.items() if k != "embed"}
    value, (d_weights, d_x) = jax.value_and_grad(loss, (0, 1))(weights, x)
    updated = jax.tree.map(lambda p, d: p - lr * d, weights, d_weights)
    return updated | {"embed": params["embed"].at[batch["words"]].add(-lr * d_x, mode="drop")}, value


def _sweep(leaves, kids, inner):
    """Returns the states of leaves and all levels; `inner` maps the states of left and right children to a level's."""
    _, levels, width = kids.shape
    table = jnp.zeros((len(leaves) + levels * width + 1, leaves.shape[1])).at[: len(leaves)].set(leaves)

    def level(table, inputs):
        t, (left, right) = inputs
        states = inner(table[left], table[right])
        return jax.lax.dynamic_update_slice_in_dim(table, states, len(leaves) + t * width, 0), None

    return jax.lax.scan(level, table, (jnp.arange(levels), kids.swapaxes(0, 1)))[0]


def _tree_lstm(p, x, batch):
    width = p["u_f"].shape[0]

    def leaf(x):
        i, o, u = jnp.split(x @ p["w_iou"] + p["b_iou"], 3, 1)
        c = jax.nn.sigmoid(i) * jnp.tanh(u)
        return jnp.concatenate([jax.nn.sigmoid(o) * jnp.tanh(c), c], 1)

    def inner(left, right):
        (h1, c1), (h2, c2) = jnp.split(left, [width], 1), jnp.split(right, [width], 1)
        i, o, u = jnp.split((h1 + h2) @ p["u_iou"] + p["b_iou"], 3, 1)
        f1, f2 = jax.nn.sigmoid(h1 @ p["u_f"] + p["b_f"]), jax.nn.sigmoid(h2 @ p["u_f"] + p["b_f"])
        c = jax.nn.sigmoid(i) * jnp.tanh(u) + f1 * c1 + f2 * c2
        return jnp.concatenate([jax.nn.sigmoid(o) * jnp.tanh(c), c], 1)

    return _sweep(leaf(x), batch["kids"], inner)[batch["read"], :width]


def _tree_fc(p, x, batch):
    def inner(left, right):
        return jnp.tanh(jnp.concatenate([left, right], 1) @ p["u"] + p["b"])

    return _sweep(x, batch["kids"], inner)[batch["read"]]


def _lstm(p, x, batch):
    width = p["u"].shape[0]

    def cell(state, gates):
        h, c = state
        i, f, o, g = jnp.split(gates + h @ p["u"], 4, 1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((x.shape[1], width))
    _, h = jax.lax.scan(cell, (zeros, zeros), x @ p["w"] + p["b"])
    return h.reshape(-1, width)[batch["read"]]
