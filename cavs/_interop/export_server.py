"""`export_server`: a forward exported for a ladder of sizes, which serves any batch that fits the largest."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from cavs._graphs.arguments import check_takes
from cavs._graphs.graphs import Graphs
from cavs._graphs.pytree import PyTree
from cavs._interop.exported import GRAPH, VERTEX, WHOLE, Exported, Forward, Serving, export_shape, rows_in, rows_of
from cavs._readers.names import aval_of, describe_array, name_of, named_leaves
from cavs._schedule.ladder import ladder
from cavs._schedule.schedule import ExportedSchedule
from cavs._schedule.scheduler import options_of
from cavs._schedule.shape import Shape, length_of
from cavs._schedule.shape_choice import Options


def export_server(
    forward: Forward,
    params: PyTree,
    graphs: Graphs,
    inputs: PyTree = None,
    *,
    most_graphs: int = 16,
    count: int = 8,
    kinds: bool | str | None = None,
    fields: Sequence[str] = (),
    scripts: bool | None = None,
    platforms: Sequence[str] | None = None,
) -> Exported:
    """Exports `forward(params, sched, inputs)` for a few sizes, so that [`cavs.interop.Exported.serve`][] takes any batch.

    ```python
    forward = lambda p, sched, x: cavs.run(F, p, sched, x, select=sched.roots)
    exported = cavs.interop.export_server(forward, params, dev, x)
    Path("model.cavs").write_bytes(exported.to_bytes())
    ```

    In a process without the source of `forward`:

    ```python
    exported = cavs.interop.load_forward(Path("model.cavs").read_bytes())
    y = exported.serve(params, batch, x_of_batch)
    ```

    The sizes are chosen from a data set: the largest one has room for `most_graphs` of its largest graph, the smallest one
    for most single graphs, and the sizes between grow by a constant factor. A batch is padded to the smallest size that it
    fits, and the number of graphs is padded with graphs without vertices.

    Each row of the result must depend on its own graph alone, and not on other graphs of the batch or on the padding.

    Args:
        forward: a pure function with any number of calls of `cavs.run` and `cavs.readout`. It returns a pytree of arrays with
            one row per vertex (Vp, ...) or per graph (G, ...).
        params: the parameters, or their shapes (`jax.eval_shape`). The values are not exported.
        graphs: the data set that chooses the sizes. Graphs that are larger than its largest are refused later.
        inputs: the inputs of the data set without padding, or their shapes: a pytree of arrays with one row per vertex
            (V, ...), graph (G, ...) or edge (E, ...), such as `{"x": x, "edges": graphs.edge_attr}`. Arrays with another number
            of rows are passed on as they are. If two of the numbers are equal, rows belong to vertices before graphs, and to
            graphs before edges; add a graph to tell them apart.
        most_graphs: the most graphs of a batch. A larger batch is served in parts.
        count: the most sizes. Each one is a program in the file, and compiles when it is first used.
        kinds: as in [`cavs.schedule`][].
        fields: as in [`cavs.schedule`][].
        scripts: as in [`cavs.schedule`][].
        platforms: the platforms to compile for, such as `("cpu", "cuda")`; `None` for JAX's default platform.

    Returns:
        The exported programs, smallest size first.

    Raises:
        TypeError: `graphs` is not [`cavs.Graphs`][], or `forward` no function of three arguments.
        ValueError: `graphs` is empty, `most_graphs` or `count` is not an int >= 1, or `forward` returns an array that has
            neither one row per vertex nor one row per graph. Errors of `forward` and of `jax.export` propagate.
    """
    check_takes("export_server: forward", forward, "params", "sched", "inputs")
    options = options_of("export_server", graphs, Options(kinds=kinds, fields=fields, scripts=scripts))
    for name, n in (("most_graphs", most_graphs), ("count", count)):
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise ValueError(f"export_server: {name}: got {n!r}; expected an int >= 1.")
    if not len(graphs):
        raise ValueError("export_server: graphs: got none; expected the data set that chooses the sizes.")
    named, counts = named_leaves(inputs, "export_server: inputs"), rows_of(graphs)
    units = {name: next((unit for unit, n in counts.items() if np.shape(x)[:1] == (n,)), WHOLE) for name, x in named.items()}
    shapes = ladder(graphs, most_graphs, count, options)
    outputs = _outputs(forward, params, shapes[0], inputs, units)
    programs = (
        export_shape("export_server", forward, params, shape, _shaped(inputs, units, shape), platforms) for shape in shapes
    )
    return Exported(shapes, tuple(programs), Serving(units, outputs))


def _shaped(inputs: PyTree, units: dict[str, str], shape: Shape) -> PyTree:
    """The shapes of inputs that are padded to a shape."""

    def padded(path: tuple[Any, ...], x: Any) -> jax.ShapeDtypeStruct:
        name = name_of(path)
        aval, rows = aval_of(x, "export_server: inputs", name), rows_in(shape).get(units[name])
        return aval if rows is None else aval.update(shape=(rows, *aval.shape[1:]))

    return jax.tree_util.tree_map_with_path(padded, inputs)


def _outputs(forward: Forward, params: PyTree, shape: Shape, inputs: PyTree, units: dict[str, str]) -> tuple[str, ...]:
    """What the rows of each output belong to, found by tracing the forward at two sizes.

    Raises `ValueError` if an output has neither a row for each vertex nor a row for each graph.
    """
    more = shape.leaves[0] + 8
    larger = shape._replace(vertices=shape.vertices + 8, leaves=(more, *shape.leaves[1:]), graphs=shape.graphs + 1)

    def traced(size: Shape) -> dict[str, jax.ShapeDtypeStruct]:
        data = jax.ShapeDtypeStruct((length_of(size),), np.int32)
        run = lambda params, data, inputs: forward(params, ExportedSchedule(data, size), inputs)  # noqa: E731
        return named_leaves(jax.eval_shape(run, params, data, _shaped(inputs, units, size)), "export_server: forward")

    first, second = traced(shape), traced(larger)
    output_units = []
    for name, x in first.items():
        lengths = (*x.shape[:1], *second[name].shape[:1])
        unit = next((u for u in (VERTEX, GRAPH) if lengths == (rows_in(shape)[u], rows_in(larger)[u])), None)
        if unit is None:
            raise ValueError(
                f"export_server: forward: got {describe_array(x)} at {name!r} of its result; expected one row per vertex "
                f"({shape.vertices}, ...) or per graph ({shape.graphs}, ...), as padding must not count. Return rows, such as "
                "cavs.run(F, params, sched, inputs, select=sched.roots), and reduce them after serve()."
            )
        output_units.append(unit)
    return tuple(output_units)
