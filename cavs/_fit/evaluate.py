"""`evaluate` and `predict`: metrics and predictions over all batches of a loader."""

import collections
import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, overload

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from cavs._feed.batches import Batches, check_bits
from cavs._feed.loader import Loader
from cavs._function.arrays import is_real
from cavs._graphs.arguments import check_takes
from cavs._graphs.checks import check_choice, check_type
from cavs._graphs.counted import counted
from cavs._graphs.graphs import Graphs
from cavs._graphs.pytree import PyTree
from cavs._step.compiled_step import over_batches
from cavs._step.donated_state import MSG_DELETED, of_mesh

Sums: TypeAlias = dict[str, float]
ROWS = ("vertices", "graphs")
# The host waits for the metrics of a dispatch only this many dispatches later, so that the device never idles.
IN_FLIGHT = 8


MSG_VARYING = (
    "evaluate: fun: got metrics that differ between devices; expected sums over all of them. Write cavs.data.total(x) for "
    "jnp.sum(x)."
)


class PendingSums(collections.deque[dict[str, Any]]):
    """Metrics that are being copied to the host while the device computes the next ones."""

    def put(self, sums: dict[str, Any]) -> None:
        """Starts an asynchronous copy of the metrics of a dispatch: scalars, or arrays with an axis of batches."""
        for x in sums.values():
            if isinstance(x, jax.Array):
                x.copy_to_host_async()
        self.append(sums)

    def added_to(self, total: Sums, left: int = 0) -> Sums:
        """Waits for the oldest metrics until `left` are left, and returns `total` plus them, in double precision."""
        while len(self) > left:
            sums = {name: float(np.asarray(x, np.float64).sum()) for name, x in self.popleft().items()}
            total = total | {name: total.get(name, 0.0) + x for name, x in sums.items()}
        return total


# What compiles each function, as long as it exists; a method, as long as its object does.
_KNOWN: dict[tuple[int, Any], Callable[..., PyTree]] = {}


def _compiled(fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """The function of one batch, for one batch or for a dispatch of them: compiled once, and freed with `fun`."""
    method = isinstance(fun, types.MethodType)  # Python creates a new one for each `object.method`
    owner, key = (fun.__self__, (id(fun.__self__), fun.__func__)) if method else (fun, (id(fun), None))
    if key not in _KNOWN:
        try:
            reference = weakref.WeakMethod(fun) if method else weakref.ref(fun)
        except TypeError:  # its class has slots
            return jax.jit(functools.partial(_call, lambda: fun))
        _KNOWN[key] = jax.jit(functools.partial(_call, reference))
        weakref.finalize(owner, _KNOWN.pop, key).atexit = False
    return _KNOWN[key]


def _call(reference: Callable[[], Any], params: PyTree, batches: PyTree) -> PyTree:
    """Calls the function of a reference with one batch, or with each batch of a dispatch."""
    fun = reference()
    if not isinstance(batches, Batches):
        return fun(params, batches)
    one = lambda params, batch: (params, fun(params, batch))  # noqa: E731
    return over_batches(one, params, batches, different=MSG_VARYING)[1]


def evaluate(fun: Callable[[Any, Any], dict[str, Any]], params: PyTree, loader: Loader) -> Sums:
    """Adds up the metrics of all batches of a loader.

    ```python
    def metrics(params, sched):
        has = sched.label >= 0
        right = has & (logits(params, sched).argmax(-1) == sched.label)
        return {"right": cavs.data.total(right), "count": cavs.data.total(has)}

    sums = cavs.data.evaluate(metrics, params, held_out)              # {"right": 71.0, "count": 104.0}
    ```

    Args:
        fun: `fun(params, batch)` returns a dict of real scalars that add up over batches. It is compiled once for each shape of
            batches, so pass the same function again and no new lambda. As for `jax.jit`, what it reads from outside is a
            constant: pass what changes in `params`. With a mesh, write [`cavs.data.total`][] for sums, as in a
            [`cavs.data.step`][].
        params: the first argument of `fun`.
        loader: the batches, one epoch of them. Stand-ins of a padded last batch must not count.

    Returns:
        The sum of each metric over all batches, in double precision.

    Raises:
        TypeError: `fun` is no function of two arguments, or returns something else; or `loader` is no loader.
        ValueError: metrics differ between the devices of a mesh; or the loader was restored within an epoch.
    """
    _check("evaluate", fun, params, loader)
    sums, pending, compiled = {}, PendingSums(), _compiled(fun)
    params = _placed(params, loader)
    for batches in loader:
        metrics = compiled(params, batches)
        _check_metrics(metrics, isinstance(batches, Batches))
        pending.put(metrics)
        sums = pending.added_to(sums, IN_FLIGHT)
    return pending.added_to(sums)


@overload
def predict(
    fun: Callable[[Any, Any], jax.Array], params: PyTree, loader: Loader[Any], rows: str = "vertices"
) -> np.ndarray: ...
@overload
def predict(fun: Callable[[Any, Any], PyTree], params: PyTree, loader: Loader[Any], rows: str = "vertices") -> PyTree: ...
def predict(fun: Callable[[Any, Any], PyTree], params: PyTree, loader: Loader[Any], rows: str = "vertices") -> PyTree:
    """Runs a function over all batches of a loader, and returns its rows in the order of the data.

    ```python
    loader = cavs.data.Loader(graphs, 64, shuffle=False)
    p = cavs.data.predict(probabilities, params, loader)              # (V, classes), row v for vertex v of `graphs`
    ```

    Args:
        fun: `fun(params, batch)` returns an array, or a pytree of arrays, with a row for each vertex (or graph) of the batch,
            as [`cavs.run`][] returns them. Rows of padding are ignored. As for `jax.jit`, what `fun` reads from outside is a
            constant: pass what changes in `params`.
        params: the first argument of `fun`.
        loader: a loader on one device, with a batch size or a list of batches, in any order.
        rows: whether `fun` returns a row for each of the "vertices" of the loader's first data set, or of its "graphs".

    Returns:
        NumPy arrays with a row for each vertex (or graph) of the data set. Rows of graphs that no batch contains are zero.

    Raises:
        TypeError: `fun` is no function of two arguments, or `loader` no loader.
        ValueError: `rows` is invalid; the loader has a mesh, parts, or an iterator of batches, or was restored within an epoch;
            or `fun` returns other rows, or keys of `jax.random`.
    """
    _check("predict", fun, params, loader)
    check_choice("predict: rows", rows, ROWS)
    settings, data = loader._settings, loader._members[0].graphs
    if settings.mesh is not None or settings.parts is not None or not loader._sampler.known:
        raise ValueError(
            "predict: loader: got a mesh, parts, or an iterator of batches; expected batches of one device. Write "
            "cavs.data.Loader(graphs, 64, shuffle=False)."
        )
    compiled, out = _compiled(fun), None
    (other,) = {*ROWS} - {rows}
    params = _placed(params, loader)
    for batches in loader:
        for results, graphs, present, padded in _each(loader, batches, compiled(params, batches)):
            at, taken = _places(data, graphs, present, rows)
            counts = {len(graphs)} if rows == "graphs" else {padded, int(np.diff(data.vertex_offsets)[graphs].sum())}
            for x in jax.tree.leaves(results):
                if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
                    raise ValueError(
                        f"predict: fun: got an array of {x.dtype}; expected numbers. Write jax.random.key_data(keys) in fun."
                    )
                if not x.ndim or len(x) not in counts:  # others are rows of edges, or of another data set
                    raise ValueError(
                        f"predict: fun: got an array of shape {x.shape} of a batch of {counted(len(graphs), 'graph')}; "
                        f"expected a row for each of the {rows}. Write rows={other!r} if it has a row for each of the {other}."
                    )
            total = len(data) if rows == "graphs" else data.num_vertices
            out = jax.tree.map(lambda x, n=total: np.zeros((n, *x.shape[1:]), x.dtype), results) if out is None else out
            for of_first, x in zip(jax.tree.leaves(out), jax.tree.leaves(results), strict=True):
                if of_first.shape[1:] != x.shape[1:]:
                    raise ValueError(
                        f"predict: fun: got rows of shape {x.shape[1:]} of one batch, and of {of_first.shape[1:]} of another; "
                        "expected one shape. Write Loader(..., shapes=1), or fun without sizes of the batch in its rows."
                    )
            jax.tree.map(lambda into, x, at=at, taken=taken: into.__setitem__(at, x[taken]), out, results)
    return out


def _check(function: str, fun: Any, params: PyTree, loader: Any) -> None:
    """Raises `TypeError` if an argument is something else, and `ValueError` if the loader has no batches, or not all."""
    check_type(f"{function}: loader", loader, Loader, f"a cavs.data.Loader. Write {function}(fun, params, loader)")
    if loader._restored and loader.batch:
        raise ValueError(
            f"{function}: loader: got one that was restored to batch {loader.batch} of an epoch, whose rest is not all data; "
            "expected one at the beginning of an epoch. Write cavs.data.Loader(graphs, 64, shuffle=False)."
        )
    if loader._sampler.known and not len(loader):
        raise ValueError(f"{function}: loader: got a loader without batches; expected at least one. Write Loader(graphs, 64).")
    check_takes(f"{function}: fun", fun, "params", "batch", write=f"{function}(fun, params, loader)")
    check_bits(params, f"{function}: params")
    leaves = jax.tree.leaves(params)
    if any(isinstance(x, Tracer) for x in leaves):
        raise TypeError(
            f"{function}: params: got arrays that are traced, as inside of jax.jit or jax.grad; expected arrays, as {function} "
            "copies its results to the host. Call it outside."
        )
    if any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves):
        raise ValueError(MSG_DELETED.format(f"{function}: params"))


def _placed(params: PyTree, loader: Loader) -> PyTree:
    """Returns parameters on the devices of a loader: of its mesh, or else one copy of those that each device of a mesh has."""
    mesh = loader._settings.mesh

    def placed(x: Any) -> Any:
        if mesh is None:
            return x.addressable_data(0) if of_mesh(x) and x.is_fully_replicated else x
        if not isinstance(x, jax.Array) or not x.committed:
            return x
        same = isinstance(x.sharding, NamedSharding) and np.array_equal(np.asarray(x.sharding.mesh.devices), mesh.devices)
        return x if same else jax.device_put(x, NamedSharding(mesh, PartitionSpec()))

    return jax.tree.map(placed, params)


def _check_metrics(metrics: Any, stacked: bool) -> None:
    """Raises `TypeError` if metrics are no dict of real scalars, or, for many batches, of arrays with an axis of batches."""
    if isinstance(metrics, dict) and all(is_real(x) and x.ndim == stacked for x in metrics.values()):
        return
    got = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape[stacked:])}", metrics)  # of one batch
    write = "{'right': cavs.data.total(right)}"
    raise TypeError(f"evaluate: fun: returned {got}; expected a dict of real scalars. Write {write}.")


def _each(loader: Loader, batches: PyTree, results: PyTree) -> Iterator[tuple[PyTree, np.ndarray, np.ndarray, int]]:
    """Yields the results of each batch that the loop has just received, of the first data set.

    With them its graphs, which of them are present, and the number of its vertices with padding.
    """
    results, epoch = jax.device_get(results), loader._planned(loader.epoch)
    stacked = isinstance(batches, Batches)
    count = len(batches) if stacked else 1
    for i, number in enumerate(np.concatenate(epoch.order)[loader.batch - count : loader.batch].tolist()):
        graphs = epoch.planned.graphs[0][number]
        # Only batches with stand-ins say which samples are none. What is picked for stand-ins are graphs of the data set.
        all_present = np.ones(len(graphs), bool)
        present = epoch.planned.present.get(number, all_present) if loader._members[0].pick is None else all_present
        padded = loader._shapes.all[int(epoch.planned.shape[number])][0].vertices
        yield jax.tree.map(lambda x, i=i: x[i], results) if stacked else results, graphs, present, padded


def _places(data: Graphs, graphs: np.ndarray, present: np.ndarray, rows: str) -> tuple[np.ndarray, np.ndarray]:
    """The rows of the data set that a batch has, and its rows in the batch."""
    if rows == "graphs":
        return graphs[present], np.flatnonzero(present)
    sizes = np.diff(data.vertex_offsets)[graphs]
    shift = data.vertex_offsets[graphs] - (np.cumsum(sizes) - sizes)
    taken = np.flatnonzero(np.repeat(present, sizes))
    return taken + np.repeat(shift, sizes)[taken], taken
