"""All peers on small random trees and chains: do they agree?

    python -m bench.peers.selfcheck

The losses before and after one and two updates and every parameter in the end must agree to
1e-5 relative. Steps a second are indicative only: the batches are tiny.
"""

import time
from types import SimpleNamespace

import numpy as np
import torch

from bench.peers import dynet_graphs, levels
from bench.peers.jax_scan import JaxScan
from bench.peers.torch_dynet_like import TorchDynetLike
from bench.peers.torch_levelled import TorchLevelled, carry
from bench.peers.torch_manual import TorchManual
from bench.peers.torch_packed_lstm import TorchPackedLSTM

VOCAB, EMBED, HIDDEN, CLASSES, TOLERANCE = 200, 32, 48, 5, 1e-5

ANY_CELL = {
    "levelled": (TorchLevelled, {}),
    "manual": (TorchManual, {}),
    "dynet-like, depth": (TorchDynetLike, {"policy": "depth"}),
    "dynet-like, agenda": (TorchDynetLike, {"policy": "agenda"}),
    "plain jax, scan": (JaxScan, {}),
}
PEERS = {
    "tree_lstm": ANY_CELL,
    "tree_fc": ANY_CELL,
    "lstm": ANY_CELL | {"packed": (TorchPackedLSTM, {}), "padded": (TorchPackedLSTM, {"padded": True})},
}


def random_tree(rng, leaves):
    """A random binary tree in post-order."""
    left, right, word = [], [], []

    def grow(n):
        if n == 1:
            children, w = (-1, -1), int(rng.integers(VOCAB))
        else:
            cut = int(rng.integers(1, n))
            children, w = (grow(cut), grow(n - cut)), -1
        left.append(children[0])
        right.append(children[1])
        word.append(w)
        return len(word) - 1

    grow(leaves)
    return {"left": np.array(left), "right": np.array(right), "word": np.array(word), "label": rng.integers(CLASSES)}


def random_batch(cell, rng, graphs):
    sizes = [1, *rng.integers(1, 25, graphs - 1).tolist()]
    if cell == "lstm":
        return [{"words": rng.integers(VOCAB, size=n), "labels": rng.integers(CLASSES, size=n)} for n in sizes]
    return [random_tree(rng, n) for n in sizes]


def random_params(cell, rng):
    e, h, c = HIDDEN if cell == "tree_fc" else EMBED, HIDDEN, CLASSES
    shapes = {
        "tree_lstm": {"w_iou": (e, 3 * h), "u_iou": (h, 3 * h), "b_iou": (3 * h,), "u_f": (h, h), "b_f": (h,)},
        "tree_fc": {"u": (2 * h, h), "b": (h,)},
        "lstm": {"w": (e, 4 * h), "u": (h, 4 * h), "b": (4 * h,)},
    }[cell]
    shapes |= {"embed": (VOCAB, e), "out_w": (h, c), "out_b": (c,)}
    return {k: rng.normal(0, 0.2, shape).astype(np.float32) for k, shape in shapes.items()}


def check_sweeps():
    """Checks that level-wide sweeps, which schedule large batches, give the schedule of the loops over nodes."""
    rng = np.random.default_rng(0)
    batch, params = random_batch("tree_lstm", rng, 30), random_params("tree_lstm", rng)
    found = []
    for below in (0, 10**9):
        levels._LOOP_BELOW = dynet_graphs._LOOP_BELOW = below
        agenda = TorchDynetLike("tree_lstm", params, policy="agenda")
        found.append((levels.tree_levels(batch).blocks().tolist(), agenda.step(batch), agenda.step(batch)))
    if found[0] != found[1]:
        raise SystemExit("the sweeps and the loops schedule differently")


def check_carry():
    """Output vertices that are children, too, stay until the end: three outputs of a DAG, by hand."""
    x = torch.tensor([[1.0], [10.0]])
    # Vertices 2 = 0 + 1 and 3 = 1 + 1, then 4 = 2 + 3. The children of a level are all left ones, then all right ones.
    dag = SimpleNamespace(sizes=[2, 1], left=np.array([0, 1, 2]), roots=np.array([2, 4, 0]))
    kids = np.array([0, 1, 1, 1, 2, 3])
    found = carry(x, dag, kids, lambda rows: rows[: len(rows) // 2] + rows[len(rows) // 2 :])
    if found.ravel().tolist() != [11.0, 31.0, 1.0]:
        raise SystemExit(f"outputs that are children: got {found.ravel().tolist()}; expected [11, 31, 1]")


def main():
    print(f"{'cell':10} {'peer':20} {'loss':>10} {'1 update':>10} {'2 updates':>10} {'deviation':>10} {'steps/s':>8}")
    worst = 0.0
    for cell, peers in PEERS.items():
        rng = np.random.default_rng(0)
        params, batches = random_params(cell, rng), [random_batch(cell, rng, n) for n in (16, 7, 16)]
        truth = None
        for name, (peer, options) in peers.items():
            system = peer(cell, params, **options)
            losses = np.array([system.step(b, lr=0.5) for b in (batches[0], batches[1], batches[0])])
            final = system.params()
            truth = truth or (losses, final)
            deviation = max(
                np.max(np.abs(losses / truth[0] - 1)),
                *(np.max(np.abs(final[k] - truth[1][k])) / np.max(np.abs(truth[1][k])) for k in params),
            )
            worst = max(worst, deviation)
            start, steps = time.perf_counter(), 0
            while time.perf_counter() - start < 0.3:
                system.step(batches[2])
                steps += 1
            rate = steps / (time.perf_counter() - start)
            print(f"{cell:10} {name:20}", *(f"{x:10.6f}" for x in losses), f"{deviation:10.1e} {rate:8.0f}")
    if not worst < TOLERANCE:
        raise SystemExit(f"the peers disagree: {worst:.1e} relative, {TOLERANCE:.0e} allowed")
    check_sweeps()
    check_carry()
    print(f"all agree: {worst:.1e} relative at most, in the losses and in every parameter after three updates")


if __name__ == "__main__":
    main()
