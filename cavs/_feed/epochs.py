"""Which graphs form a batch: the batches of an epoch, drawn from a seed, and the order in which they run."""

from collections.abc import Sequence

import numpy as np

GROUPS = ("balanced", "similar", "random")


def epoch_batches(sizes: np.ndarray, batch: int, group: str, seed: int | None, epoch: int) -> np.ndarray:
    """Returns the batches of one epoch. They depend only on the arguments, so a resumed run gets the same ones.

    Args:
        sizes: (G,) the number of vertices of each graph.
        batch: graphs per batch.
        group: "balanced" (see `strata`), "similar" (a batch has graphs of similar sizes) or "random".
        seed: the source of randomness; `None` for the same batches in every epoch, "random" then being the order of the graphs.
        epoch: the number of the epoch.

    Returns:
        (batches, batch) numbers of graphs. The last batch may have fewer: its row ends with -1.
    """
    total = len(sizes)
    rng = None if seed is None else np.random.default_rng([seed, 2, epoch])
    whole, left = divmod(total, batch)
    order = np.arange(total) if rng is None else rng.permutation(total)
    if group == "balanced" and left:
        order = np.concatenate([*_one_of_each_stratum(sizes, left, rng)])
    if group == "similar":
        order = order[np.argsort(sizes[order], kind="stable")]
        # The batch that is left over is one of any size, not of the largest graphs.
        last = (whole + 1) // 2 if rng is None else int(rng.integers(whole + 1))
        inside = np.zeros(total, bool)
        inside[last * batch : last * batch + left] = True
        order = np.concatenate([order[~inside], order[inside]])
    grid = order[: whole * batch].reshape(whole, batch)
    if group == "balanced" and whole:
        grid = order[: whole * batch][strata(sizes[order[: whole * batch]], batch, rng)]
    elif group == "similar" and rng is not None:
        grid = grid[rng.permutation(whole)]
    if left:
        grid = np.concatenate([grid, np.append(order[whole * batch :], np.full(batch - left, -1))[None]])
    return grid


def _one_of_each_stratum(sizes: np.ndarray, count: int, rng: np.random.Generator | None) -> tuple[np.ndarray, np.ndarray]:
    """Draws `count` graphs, one of each of as many strata of equal sizes. Returns the graphs that remain, and those drawn."""
    by_size = np.argsort(sizes, kind="stable")
    edges = np.linspace(0, len(sizes), count + 1).astype(int)
    drawn = (edges[:-1] + edges[1:]) // 2 if rng is None else rng.integers(edges[:-1], edges[1:])
    others = np.ones(len(sizes), bool)
    others[drawn] = False
    return by_size[others], by_size[drawn]


def strata_of_batches(sizes: np.ndarray, batch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """From which graphs the "balanced" batches of all epochs are drawn.

    Args:
        sizes: (G,) the number of vertices of each graph.
        batch: graphs per batch.

    Returns:
        The graphs by size; (batch, 2), in that order, the begin and end of the stratum of each place of a batch; and
        (G % batch, 2) the same for the last batch.
    """
    total = len(sizes)
    whole, left = divmod(total, batch)
    begin = np.arange(batch) * whole
    edges = np.linspace(0, total, left + 1).astype(int)
    # The graphs of the last batch are taken out first, so that the others move down by up to `left` places.
    full = np.stack([begin, np.minimum(begin + whole + left, total)], 1)
    return np.argsort(sizes, kind="stable"), full, np.stack([edges[:-1], edges[1:]], 1)


def dealt_strata(sizes: np.ndarray, edges: np.ndarray, parts: int) -> np.ndarray:
    """Returns the strata of a part's places if batches with one graph of each stratum are dealt by size to `parts` parts.

    Args:
        sizes: (G,) the sizes of the graphs, ascending.
        edges: (batch, 2) the begin and end of the stratum of each place of a batch, ascending.
        parts: the number of parts, which divides the length of `edges`.

    Returns:
        (batch / parts, 2) the begin and end of the stratum of each place of a part.
    """
    if parts == 1:
        return edges
    begin, end = edges[::parts, 0], edges[parts - 1 :: parts, 1]
    # Graphs of equal sizes may change places.
    return np.stack([np.searchsorted(sizes, sizes[begin], "left"), np.searchsorted(sizes, sizes[end - 1], "right")], 1)


def strata(sizes: np.ndarray, batch: int, rng: np.random.Generator | None) -> np.ndarray:
    """Groups graphs into batches of nearly equal total size, so that few shapes and compilations are needed.

    The graphs are sorted by size, equal sizes in random order, and cut into as many strata as a batch has places. A batch takes
    one graph from each stratum. The strata of large graphs are assigned at random. In the strata of small graphs, the batch
    that is smallest so far takes the largest graph.

    Args:
        sizes: (G,) the number of vertices of each graph.
        batch: graphs per batch.
        rng: the source of randomness; `None` for the same batches every time.

    Returns:
        (batches, batch) numbers of graphs; -1 where a batch has fewer.
    """
    total = len(sizes)
    batch = min(batch, total)
    count = -(-total // batch)
    tie = np.arange(total) if rng is None else rng.permutation(total)
    order = np.lexsort((tie, sizes))
    grid = np.concatenate([np.full(count * batch - total, -1), order]).reshape(batch, count)
    size = np.where(grid >= 0, sizes[grid], sizes.min())
    sums = np.zeros(count, np.int64)
    for i in reversed(range(batch)):
        if rng is not None and i >= batch // 2:
            take = rng.permutation(count)
        else:
            take = np.empty(count, np.int64)
            take[np.argsort(sums, kind="stable")] = np.arange(count)[::-1]
        grid[i] = grid[i, take]
        sums += size[i, take]
    out = np.ascontiguousarray(grid.T)
    return out if rng is None else out[rng.permutation(count)]


def dispatches(shape: Sequence[int] | np.ndarray, steps: int, partial: bool = False) -> list[np.ndarray]:
    """Returns the order in which batches run: consecutive batches of one shape together, `steps` at a time, and then the rest.

    Args:
        shape: the number of the shape of each batch.
        steps: batches of a dispatch.
        partial: whether the rest of a shape runs in one dispatch; otherwise one by one.

    Returns:
        The numbers of the batches of each dispatch. Batches of one shape keep their order. The order of all batches does not
        depend on `partial`, so that a position saved on one device is valid on several.
    """
    shapes = np.asarray(shape)
    whole: list[np.ndarray] = []
    rest: list[np.ndarray] = []
    for number in np.unique(shapes):
        mine = np.flatnonzero(shapes == number)
        end = len(mine) // steps * steps
        whole += [*mine[:end].reshape(-1, steps)]
        rest += [mine[end:]] if end < len(mine) else []
    whole, rest = sorted(whole, key=lambda some: some[-1]), sorted(rest, key=lambda some: some[0])
    return whole + (rest if partial else [some[i : i + 1] for some in rest for i in range(len(some))])
