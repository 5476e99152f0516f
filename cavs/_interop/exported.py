"""`export_forward`: a trained forward pass as bytes, which run without the source of the vertex function."""

import dataclasses
import functools
import hashlib
import io
import json
import re
import zipfile
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import export as jax_export

from cavs._graphs.pytree import PyTree
from cavs._interop.names import describe_array, named_leaves
from cavs._run.run import without_callbacks
from cavs._schedule.schedule import Schedule
from cavs._schedule.shape import Shape, length_of, slots_of

Arrays: TypeAlias = dict[str, jax.Array]  # the leaves of a pytree by name
Forward: TypeAlias = Callable[[PyTree, Schedule, PyTree], PyTree]

# A file consists of this line, the SHA-256 of the rest, and the rest: a zip of `about.json` and of the outputs of `jax.export`,
# `N.jax`.
_MAGIC, _FORMAT = b"cavs forward ", 2
# The external functions that compiled code may call: JAX's linear algebra and random numbers, and the kernels of the
# persistent engine. Callbacks into Python are refused.
_CALLS = re.compile(
    r"(lapack|cusolver|cublas|cusparse|hipsolver|hipblas|cu|hip)_\w+|Sharding|SPMD\w+Shape|annotate_device_placement|AllocateBuffer"
    r"|ApproxTopK|stablehlo\.dynamic_\w+|shape_assertion|mosaic_gpu_v2|Eigh|Qr|LuDecomposition|ProductOfElementaryHouseholderReflectors"
)


@dataclasses.dataclass(frozen=True)
class Exported:
    """Exported forwards, one per schedule shape; see [`cavs.interop.export_forward`][] and [`cavs.interop.load_forward`][].

    Attributes:
        shapes: the schedule shapes. `cavs.schedule(batch, shapes=list(exported.shapes))` chooses one of them if the batch fits.
        programs: the `jax.export.Exported` of each shape.
    """

    shapes: tuple[Shape, ...]
    programs: tuple[jax_export.Exported, ...]

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
        if not isinstance(sched, Schedule):
            raise TypeError(
                f"Exported: sched: got a {type(sched).__name__}; expected a cavs.Schedule. Write cavs.schedule(graphs)."
            )
        if sched.shape not in self.shapes:
            have = [(shape.graphs, shape.vertices) for shape in self.shapes]
            raise ValueError(
                f"Exported: sched: got {sched.shape}; expected one of the exported shapes, whose (graphs, padded vertices) are "
                f"{have}. Write cavs.schedule(batch, shapes=list(exported.shapes)) with the same number of graphs in a batch. "
                "If none fits, export a larger example."
            )
        program = self.programs[self.shapes.index(sched.shape)]
        got = {"params": named_leaves(params, "Exported: params"), "inputs": named_leaves(inputs, "Exported: inputs")}
        (params_avals, _, inputs_avals), _ = jax.tree.unflatten(program.in_tree, program.in_avals)
        for argument, avals in (("params", params_avals), ("inputs", inputs_avals)):
            for name in {**avals, **got[argument]}:
                has, expected = (describe_array(tree.get(name)) for tree in (got[argument], avals))
                if has != expected:
                    hint = " Pad inputs on the host: sched.pad(rows)." if argument == "inputs" else ""
                    raise ValueError(f"Exported: {argument}: got {has} at {name!r}; expected {expected}.{hint}")
        return program.call(got["params"], jnp.asarray(sched.data), got["inputs"])

    def to_bytes(self) -> bytes:
        """Serialises the programs for a file that [`cavs.interop.load_forward`][] reads.

        Raises:
            ImportError: flatbuffers, which `jax.export` needs, is not installed.
        """
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as file:
            file.writestr("about.json", json.dumps({"shapes": self.shapes, "layout": _layout_hash(self.shapes)}))
            for i, program in enumerate(self.programs):
                file.writestr(f"{i}.jax", bytes(program.serialize()))
        data = buffer.getvalue()
        return _MAGIC + b"%d\n" % _FORMAT + hashlib.sha256(data).digest() + data


def export_forward(
    forward: Forward,
    params: PyTree,
    examples: Sequence[tuple[Schedule, PyTree]],
    *,
    platforms: Sequence[str] | None = None,
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
    named = named_leaves(params, "export_forward: params")
    found: dict[Shape, Any] = {}
    for n, example in enumerate(examples):
        if not isinstance(example, tuple) or len(example) != 2 or not isinstance(example[0], Schedule):
            raise TypeError(f"export_forward: examples[{n}]: got a {type(example).__name__}; expected a pair (sched, inputs).")
        sched, inputs = example
        if sched.shape in found:
            continue
        trees = jax.tree.structure(params), jax.tree.structure(inputs)
        arguments = named, named_leaves(inputs, "export_forward: inputs")
        shaped = [jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree) for tree in arguments]
        flat = functools.partial(_run_named, forward, sched.shape, trees, [list(tree) for tree in arguments])
        data = jax.ShapeDtypeStruct(sched.data.shape, sched.data.dtype)
        with without_callbacks():
            found[sched.shape] = jax_export.export(jax.jit(flat), platforms=platforms)(shaped[0], data, shaped[1])
    return Exported(tuple(found), tuple(found.values()))


def _run_named(
    forward: Forward,
    shape: Shape,
    trees: tuple[Any, Any],
    names: Sequence[list[str]],
    params: Arrays,
    data: jax.Array,
    inputs: Arrays,
) -> PyTree:
    """Runs `forward` on leaves by name, so that the file does not depend on the user's container classes."""
    arguments = zip(trees, names, (params, inputs), strict=True)
    unflat_params, unflat_inputs = (tree.unflatten([leaves[name] for name in own]) for tree, own, leaves in arguments)
    return forward(unflat_params, Schedule(data, shape), unflat_inputs)


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
        ValueError: `data` is damaged or not such a file; it disables safety checks of `jax.export`; it calls external
            functions that no forward pass needs, such as Python callbacks; or the version of cavs that wrote it has another
            layout of schedules.
        ImportError: flatbuffers is not installed.
    """
    head, _, _ = bytes(data[:64]).partition(b"\n")
    if not head.startswith(_MAGIC):
        raise ValueError("load_forward: data: got bytes of another format; expected those of Exported.to_bytes().")
    if head != _MAGIC + b"%d" % _FORMAT:
        got = head.removeprefix(_MAGIC).decode("ascii", "replace")
        raise ValueError(f"load_forward: data: got format {got!r}; expected {_FORMAT}. Another version of cavs wrote it.")
    begin = len(head) + 1 + hashlib.sha256().digest_size
    if hashlib.sha256(data[begin:]).digest() != data[len(head) + 1 : begin]:
        raise ValueError("load_forward: data: got a wrong checksum; expected undamaged bytes. Copy the file again.")
    try:
        with zipfile.ZipFile(io.BytesIO(data[begin:])) as file:
            about = json.loads(file.read("about.json"))
            shapes = tuple(Shape(*_tuples(s)) for s in about["shapes"])
            same = _layout_hash(shapes) == about["layout"]
            programs = tuple(_load_program(file.read(f"{i}.jax"), shape) for i, shape in enumerate(shapes)) if same else ()
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
    return Exported(shapes, programs)


def _load_program(data: bytes, shape: Shape) -> jax_export.Exported:
    """Loads the program of one schedule shape. Raises many types of exceptions if the bytes are invalid."""
    program = jax_export.deserialize(bytearray(data))
    if program.disabled_safety_checks:
        raise ValueError(f"it disables safety checks: {program.disabled_safety_checks}")
    text = program.mlir_module()
    calls = re.findall(r'custom_call @"?([^\s"(]+)|call_target_name = "([^"]*)"', text)
    wrong = sorted({one or other for one, other in calls if not _CALLS.fullmatch(one or other)})
    if wrong or len(re.findall(r"\bstablehlo\.custom_call\b", text)) > len(calls):
        raise ValueError(f"it calls {', '.join(wrong) or 'a function without a name'}, which no forward pass needs")
    (params, vector, inputs), _ = jax.tree.unflatten(program.in_tree, program.in_avals)
    if not (isinstance(params, dict) and isinstance(inputs, dict) and vector.shape == (length_of(shape),)):
        raise ValueError("its arguments are not parameters, a schedule of its shape, and inputs")
    return program


def _layout_hash(shapes: Sequence[Shape]) -> str:
    """A hash of the layout of the schedules' integers, which the exported code relies on."""
    return hashlib.sha256(repr([(shape._fields, slots_of(shape)) for shape in shapes]).encode()).hexdigest()


def _tuples(x: PyTree) -> PyTree:
    """Converts nested lists, as JSON has them, to tuples."""
    return tuple(_tuples(y) for y in x) if isinstance(x, list) else x
