"""A trained forward as bytes, which run without the source of the vertex function: `export_forward` and `load_forward`."""

import dataclasses
import functools
import hashlib
import io
import json
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax import export as jax_export

from cavs._feed.batches import check_bits
from cavs._function.arrays import check_unmasked
from cavs._graphs.checks import check_type
from cavs._graphs.graphs import Graphs
from cavs._graphs.pytree import PyTree
from cavs._readers.names import aval_of, describe_array, named_leaves
from cavs._schedule.ladder import schedule_into, why_not
from cavs._schedule.schedule import ExportedSchedule, Schedule, check_schedule
from cavs._schedule.shape import Shape, length_of, slots_of

Arrays: TypeAlias = dict[str, jax.Array]  # the leaves of a pytree by name
Forward: TypeAlias = Callable[[PyTree, Schedule, PyTree], PyTree]

# A file consists of this line, the SHA-256 of the rest, and the rest: a zip of `about.json` and of the outputs of `jax.export`,
# `N.jax`.
MAGIC, FORMAT = b"cavs forward ", 3

# What the rows of an array belong to; "whole": they are not of the batch.
VERTEX, GRAPH, EDGE, WHOLE = "vertex", "graph", "edge", "whole"


class Serving(NamedTuple):
    """What a server knows about a forward's arguments and results."""

    inputs: dict[str, str]  # of each input by name, what its rows belong to: `"vertex"`, `"graph"`, `"edge"` or `"whole"`
    outputs: tuple[str, ...]  # of each output in turn, what its rows belong to: `"vertex"` or `"graph"`


@dataclasses.dataclass(frozen=True)
class Exported:
    """Exported forwards, one per schedule shape. Created by [`cavs.interop.export_server`][],
    [`cavs.interop.export_forward`][] and [`cavs.interop.load_forward`][].

    `serve` takes any graphs. `exported(params, sched, inputs)` runs a schedule of one of `shapes`, with inputs padded by
    `sched.pad`; it raises a `ValueError` if the shape was not exported or an array does not fit.

    Attributes:
        shapes: the schedule shapes. `cavs.schedule(batch, shapes=list(exported.shapes))` chooses one of them if the batch fits.
        programs: the `jax.export.Exported` of each shape.
        serving: what `serve` knows about inputs and outputs; `None` if `export_forward` exported them.
    """

    shapes: tuple[Shape, ...]
    programs: tuple[jax_export.Exported, ...]
    serving: Serving | None = None

    def __repr__(self) -> str:
        sizes = ", ".join(f"{shape.graphs} graphs of {shape.vertices} vertices" for shape in self.shapes)
        usage = "for schedules of its shapes" if self.serving is None else "with serve(params, graphs, inputs)"
        return f"Exported({len(self.shapes)} padded shapes: {sizes}; {usage})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles, such as those for another process, compile again."""
        return load_forward, (self.to_bytes(),)

    @functools.cached_property
    def _compiled(self) -> tuple[Callable[[Arrays, Any, Arrays], PyTree], ...]:
        """The programs as functions that compile at their first call."""
        return tuple(jax.jit(program.call) for program in self.programs)

    def serve(self, params: PyTree, graphs: Graphs, inputs: PyTree = None) -> PyTree:
        """Runs the forward that [`cavs.interop.export_server`][] exported on any batch.

        ```python
        rows = exported.serve(params, graphs, {"x": x})
        ```

        The batch is padded to the smallest exported size that it fits, which compiles when it is first used. A batch that fits
        none is run in several parts.

        Args:
            params: a pytree whose leaves have the names, shapes and dtypes of the exported parameters.
            graphs: any number of graphs, which are not scheduled yet.
            inputs: a pytree with the names and dtypes of the exported inputs, one row per vertex (V, ...), graph (G, ...) or
                edge (E, ...) of this batch, without padding. NumPy's 64 bits become JAX's 32.

        Returns:
            What the forward returned, as NumPy arrays with one row per vertex or per graph of this batch, in order.

        Raises:
            TypeError: `graphs` is not [`cavs.Graphs`][].
            ValueError: a graph does not fit the largest size, an array is missing, is unknown or has another shape or dtype, or
                the forward was exported by `export_forward`.
        """
        if self.serving is None:
            raise ValueError(
                "Exported.serve: got a forward that export_forward exported for schedules of exact shapes; expected one that "
                "takes any batch. Write cavs.interop.export_server(forward, params, graphs, inputs)."
            )
        check_type("Exported.serve: graphs", graphs, Graphs, "cavs.Graphs, which are not scheduled yet")
        named = _checked_inputs(named_leaves(inputs, "Exported.serve: inputs"), self.serving, graphs)
        units = {name: self.serving.inputs.get(name, WHOLE) for name in named}
        parts = _parts_of(graphs, sorted(self.shapes, key=lambda shape: shape.vertices))
        start, outs = dict.fromkeys(rows_of(graphs), 0), []
        for part, sched in parts:
            count, room = rows_of(part), rows_in(sched.shape)
            pieces = {
                name: x if (unit := units[name]) == WHOLE else _padded(x[start[unit] : start[unit] + count[unit]], room[unit])
                for name, x in named.items()
            }
            outs.append(self._run(self.shapes.index(sched.shape), params, sched, pieces))
            start = {unit: start[unit] + count[unit] for unit in start}
        leaves, trees = zip(*map(jax.tree.flatten, outs), strict=True)
        rows = []
        for unit, *arrays in zip(self.serving.outputs, *leaves, strict=True):
            pieces = [np.asarray(x)[: rows_of(part)[unit]] for x, (part, _) in zip(arrays, parts, strict=True)]
            rows.append(pieces[0] if len(pieces) == 1 else np.concatenate(pieces))
        return jax.tree.unflatten(trees[0], rows)

    def __call__(self, params: PyTree, sched: Schedule, inputs: PyTree = None) -> PyTree:
        """Runs `forward(params, sched, inputs)`.

        Args:
            params: a pytree whose leaves have the names, shapes and dtypes of the exported parameters.
            sched: a schedule of one of `shapes`.
            inputs: a pytree of inputs, padded by `sched.pad`.

        Returns:
            What `forward` returned.

        Raises:
            TypeError: `sched` is not a schedule.
            ValueError: the shape of `sched` was not exported, or an array is missing, is unknown, or has another shape or
                dtype.
        """
        check_schedule("Exported", sched)
        if sched.shape not in self.shapes:
            sizes = [(shape.graphs, shape.vertices) for shape in self.shapes]
            raise ValueError(
                f"Exported: sched: got {sched.shape}; expected one of the exported shapes, whose (graphs, padded vertices) are "
                f"{sizes}. Write cavs.schedule(batch, shapes=list(exported.shapes)) with the same number of graphs in a batch. "
                "If none fits, export a larger example."
            )
        return self._run(self.shapes.index(sched.shape), params, sched, inputs)

    def _run(self, number: int, params: PyTree, sched: Schedule, inputs: PyTree) -> PyTree:
        program = self.programs[number]
        leaves = {"params": named_leaves(params, "Exported: params"), "inputs": named_leaves(inputs, "Exported: inputs")}
        (params_avals, _, inputs_avals), _ = jax.tree.unflatten(program.in_tree, program.in_avals)
        for argument, avals in (("params", params_avals), ("inputs", inputs_avals)):
            check_bits(leaves[argument], f"Exported: {argument}")
            for name in {**avals, **leaves[argument]}:
                leaf, expected = leaves[argument].get(name), avals.get(name)
                leaf = None if leaf is None else aval_of(leaf, f"Exported: {argument}", name)
                if leaf is not None and expected is not None and (leaf.dtype, leaf.shape) == (expected.dtype, expected.shape):
                    continue
                hint = " Pad inputs on the host: sched.pad(rows)." if argument == "inputs" and self.serving is None else ""
                leaf, expected = describe_array(leaf), describe_array(expected)
                raise ValueError(f"Exported: {argument}: got {leaf} at {name!r}; expected {expected}.{hint}")
        return self._compiled[number](leaves["params"], sched.data, leaves["inputs"])

    def to_bytes(self) -> bytes:
        """Serialises the programs for a file that [`cavs.interop.load_forward`][] reads.

        Raises:
            ImportError: flatbuffers, which `jax.export` needs, is not installed.
        """
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as file:
            about = {"shapes": self.shapes, "layout": layout_hash(self.shapes), "serving": self.serving}
            file.writestr("about.json", json.dumps(about))
            for i, program in enumerate(self.programs):
                file.writestr(f"{i}.jax", bytes(program.serialize()))
        data = buffer.getvalue()
        return MAGIC + b"%d\n" % FORMAT + hashlib.sha256(data).digest() + data


def rows_of(graphs: Graphs) -> dict[str, int]:
    """Returns how many rows an array has without padding, by what they belong to."""
    return {VERTEX: graphs.num_vertices, GRAPH: len(graphs), EDGE: graphs.num_edges}


def rows_in(shape: Shape) -> dict[str, int]:
    """Returns how many rows an array has with padding, by what they belong to."""
    return {VERTEX: shape.vertices, GRAPH: shape.graphs, EDGE: shape.all_edges}


def _parts_of(graphs: Graphs, shapes: Sequence[Shape], first: int = 0) -> list[tuple[Graphs, Schedule]]:
    """Schedules a batch, in halves if it does not fit any of the shapes, and so on.

    `first`: the number of the first graph. Raises `ValueError` if a single graph does not fit.
    """
    sched = schedule_into(graphs, shapes)
    if sched is not None:
        return [(graphs, sched)]
    if len(graphs) < 2:
        raise ValueError(
            f"Exported.serve: graphs: got {why_not(graphs, shapes)}, in graph {first}. Export again, with graphs like this one "
            "among those that choose the sizes: cavs.interop.export_server(forward, params, graphs, inputs)."
        )
    half = len(graphs) // 2
    return _parts_of(graphs[:half], shapes, first) + _parts_of(graphs[half:], shapes, first + half)


def _checked_inputs(named: dict[str, Any], serving: Serving, graphs: Graphs) -> dict[str, Any]:
    """Returns the inputs, those with rows of the batch in host memory.

    Raises `ValueError` if an input is missing or unknown, or has another number of rows, and `TypeError` if values are masked.
    """
    out = dict(named)
    for name in {**serving.inputs, **named}:
        unit, x = serving.inputs.get(name), named.get(name)
        if unit is None or x is None:
            got = "nothing" if x is None else f"a {type(x).__name__}"
            expected = "nothing" if unit is None else "an array" if unit == WHOLE else f"an array with one row per {unit}"
            names = ", ".join(map(repr, filter(None, serving.inputs))) or "one array" * len(serving.inputs) or "no inputs"
            raise ValueError(f"Exported.serve: inputs: got {got} at {name!r}; expected {expected}. The forward reads {names}.")
        rows = rows_of(graphs).get(unit)
        if rows is None:
            continue
        check_unmasked(x, "Exported.serve: inputs", repr(name))
        out[name] = np.asarray(x)
        if np.shape(x)[:1] != (rows,):
            raise ValueError(
                f"Exported.serve: inputs: got shape {np.shape(x)} at {name!r}; expected ({rows}, ...), one row per {unit} of "
                "the batch, without padding."
            )
    return out


def _padded(rows: np.ndarray, count: int) -> np.ndarray:
    """Returns `count` rows: those given, and then the first one, or zeros if there is none."""
    out = np.empty((count, *rows.shape[1:]), rows.dtype)
    out[: len(rows)] = rows
    out[len(rows) :] = rows[0] if len(rows) else 0
    return out


def export_forward(
    forward: Forward, params: PyTree, examples: Sequence[tuple[Schedule, PyTree]], *, platforms: Sequence[str] | None = None
) -> Exported:
    """Exports `forward(params, sched, inputs)` with `jax.export`, once per schedule shape of the examples.

    ```python
    forward = lambda p, sched, x: cavs.run(F, p, sched, x, select=sched.roots)
    exported = cavs.interop.export_forward(forward, params, [(sched, x)])
    Path("model.cavs").write_bytes(exported.to_bytes())
    ```

    In a process without the source of `forward`:

    ```python
    exported = cavs.interop.load_forward(Path("model.cavs").read_bytes())
    sched = cavs.schedule(batch, shapes=list(exported.shapes))
    y = exported(cavs.io.load_params("model.safetensors"), sched, sched.pad(x))
    ```

    Args:
        forward: a pure function with any number of calls of `cavs.run` and `cavs.readout`.
        params: the parameters, or their shapes (`jax.eval_shape`). The values are not exported.
        examples: pairs (schedule, inputs padded by `sched.pad`). Only their shapes matter, and each schedule shape is exported
            once.
        platforms: the platforms to compile for, such as `("cpu", "cuda")`; `None` for JAX's default platform.

    Returns:
        The exported programs.

    Raises:
        TypeError: an example is not such a pair.
        ValueError: there are no examples. Errors of `forward` and of `jax.export` propagate.
    """
    if not examples:
        raise ValueError("export_forward: examples: got none; expected pairs (sched, inputs), one per shape to export.")
    check_type("export_forward: examples", examples, Iterable, "a list of pairs. Write [(sched, sched.pad(x))]")
    programs: dict[Shape, Any] = {}
    for n, example in enumerate(examples):
        if not isinstance(example, tuple) or len(example) != 2 or not isinstance(example[0], Schedule):
            raise TypeError(f"export_forward: examples[{n}]: got a {type(example).__name__}; expected a pair (sched, inputs).")
        sched, inputs = example
        if sched.shape not in programs:
            programs[sched.shape] = export_shape("export_forward", forward, params, sched.shape, inputs, platforms)
    return Exported(tuple(programs), tuple(programs.values()))


def export_shape(
    function: str, forward: Forward, params: PyTree, shape: Shape, inputs: PyTree, platforms: Sequence[str] | None
) -> jax_export.Exported:
    """Exports a forward for schedules of one shape. Only the shapes of arrays matter. `function` is named by errors."""
    trees = jax.tree.structure(params), jax.tree.structure(inputs)
    named = {f"{function}: params": params, f"{function}: inputs": inputs}
    arguments = [named_leaves(tree, argument) for argument, tree in named.items()]
    shaped = [
        {name: aval_of(x, argument, name) for name, x in leaves.items()}
        for argument, leaves in zip(named, arguments, strict=True)
    ]

    def exported(x: Any) -> Any:
        return ExportedSchedule(x.data, x.shape) if type(x) is Schedule else x

    def run_named(params: Arrays, data: jax.Array, inputs: Arrays) -> PyTree:
        """Runs `forward` on leaves by name, so that the file does not depend on the user's container classes."""
        in_order = ([leaves[name] for name in names] for leaves, names in zip((params, inputs), arguments, strict=True))
        unflat_params, unflat_inputs = (tree.unflatten(leaves) for tree, leaves in zip(trees, in_order, strict=True))
        unflat_inputs = jax.tree.map(exported, unflat_inputs, is_leaf=lambda x: isinstance(x, Schedule))
        return forward(unflat_params, ExportedSchedule(data, shape), unflat_inputs)

    data = jax.ShapeDtypeStruct((length_of(shape),), np.int32)
    return jax_export.export(jax.jit(run_named), platforms=platforms)(shaped[0], data, shaped[1])


def layout_hash(shapes: Sequence[Shape]) -> str:
    """A hash of the layout of the schedules' integers, which the exported code relies on."""
    return hashlib.sha256(repr([(shape._fields, slots_of(shape)) for shape in shapes]).encode()).hexdigest()


# The external functions that compiled code may call: JAX's linear algebra and random numbers, and the kernels of the
# persistent engine. Callbacks into Python are refused.
_CALLS = re.compile(
    r"(lapack|cusolver|cublas|cusparse|hipsolver|hipblas|cu|hip)_\w+|Sharding|SPMD\w+Shape|annotate_device_placement|AllocateBuffer"
    r"|ApproxTopK|stablehlo\.dynamic_\w+|shape_assertion|mosaic_gpu_v2|Eigh|Qr|LuDecomposition|ProductOfElementaryHouseholderReflectors"
)


def load_forward(data: bytes) -> Exported:
    """Loads what [`cavs.interop.export_forward`][] exported.

    **Load only files that you trust, as you would run only programs that you trust.** They contain code, and calling the
    result runs it. The checksum detects damaged files, but not malicious ones: a malicious file can do anything that this
    process is allowed to do. If you transfer a file, keep its checksum and compare it before loading.

    Args:
        data: the bytes of [`cavs.interop.Exported.to_bytes`][].

    Returns:
        The exported programs.

    Raises:
        TypeError: `data` are no bytes.
        ValueError: `data` is damaged or not such a file; it disables safety checks of `jax.export`; it calls external
            functions that no forward pass needs, such as Python callbacks; or the version of cavs that wrote it has another
            layout of schedules.
        ImportError: flatbuffers is not installed.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        is_path = isinstance(data, str | os.PathLike)
        hint = "Write load_forward(pathlib.Path(path).read_bytes())" if is_path else "Open the file as 'rb'"
        raise TypeError(f"load_forward: data: got a {type(data).__name__}; expected the bytes of Exported.to_bytes(). {hint}.")
    head, _, _ = bytes(data[:64]).partition(b"\n")
    if not head.startswith(MAGIC):
        raise ValueError("load_forward: data: got bytes of another format; expected those of Exported.to_bytes().")
    if head != MAGIC + b"%d" % FORMAT:
        got = head.removeprefix(MAGIC).decode("ascii", "replace")
        raise ValueError(f"load_forward: data: got format {got!r}; expected {FORMAT}. Another version of cavs wrote it.")
    begin = len(head) + 1 + hashlib.sha256().digest_size
    if hashlib.sha256(data[begin:]).digest() != data[len(head) + 1 : begin]:
        raise ValueError("load_forward: data: got a wrong checksum; expected undamaged bytes. Copy the file again.")
    try:
        with zipfile.ZipFile(io.BytesIO(data[begin:])) as file:
            about = json.loads(file.read("about.json"))
            shapes = tuple(Shape(*_tuples(s)) for s in about["shapes"])
            same = layout_hash(shapes) == about["layout"]
            programs = tuple(_load_program(file.read(f"{i}.jax"), shape) for i, shape in enumerate(shapes)) if same else ()
            serving = _load_serving(about["serving"], programs)
    except ImportError:
        raise
    except Exception as error:
        # zipfile, json, flatbuffers and jax.export raise a dozen exception types for invalid bytes.
        raise ValueError(
            f"load_forward: data: got bytes that cannot be loaded ({error}); expected those of Exported.to_bytes(), written "
            "with a compatible version of JAX."
        ) from error
    if not same:
        raise ValueError(
            "load_forward: data: got another layout of schedules; expected that of this version of cavs. Export again with it."
        )
    return Exported(shapes, programs, serving)


def _load_serving(fields: Any, programs: Sequence[jax_export.Exported]) -> Serving | None:
    """What `about.json` says about inputs and outputs. Raises many types of exceptions if it is invalid."""
    if fields is None:
        return None
    inputs, outputs = dict(fields[0]), tuple(fields[1])
    if not {*inputs.values()} <= {VERTEX, GRAPH, EDGE, WHOLE} or not {*outputs} <= {VERTEX, GRAPH}:
        raise ValueError("it has rows of neither vertices nor graphs")
    if any(program.out_tree.num_leaves != len(outputs) for program in programs):
        raise ValueError("it has another number of outputs")
    return Serving(inputs, outputs)


def _load_program(data: bytes, shape: Shape) -> jax_export.Exported:
    """Loads the program of one schedule shape. Raises many types of exceptions if the bytes are invalid."""
    program = jax_export.deserialize(bytearray(data))
    if program.disabled_safety_checks:
        raise ValueError(f"it disables safety checks: {program.disabled_safety_checks}")
    text = program.mlir_module()
    calls = re.findall(r'custom_call @"?([^\s"(]+)|call_target_name = "([^"]*)"', text)
    wrong = sorted({symbol or attribute for symbol, attribute in calls if not _CALLS.fullmatch(symbol or attribute)})
    if wrong or len(re.findall(r"\bstablehlo\.custom_call\b", text)) > len(calls):
        raise ValueError(f"it calls {', '.join(wrong) or 'a function without a name'}, which no forward pass needs")
    (params, vector, inputs), _ = jax.tree.unflatten(program.in_tree, program.in_avals)
    if not (isinstance(params, dict) and isinstance(inputs, dict) and vector.shape == (length_of(shape),)):
        raise ValueError("its arguments are not parameters, a schedule of its shape, and inputs")
    return program


def _tuples(x: PyTree) -> PyTree:
    """Converts nested lists, as JSON has them, to tuples."""
    return tuple(_tuples(y) for y in x) if isinstance(x, list) else x
