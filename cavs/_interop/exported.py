"""`export_forward`: a trained forward as bytes, compiled code for a bucket of shapes each, that run without F's source."""

import dataclasses
import functools
import hashlib
import io
import json
import re
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import export as jax_export

from cavs._interop.names import named_leaves
from cavs._run.run import without_callbacks
from cavs._schedule.schedule import Schedule, Shape, layout_of, length_of

# A file is these words, the SHA-256 of the rest, and the rest: a zip of `about.json` and of `N.jax`, what `jax.export` writes.
_MAGIC, _FORMAT = b"cavs forward ", 2
# What compiled code may call outside itself: jax's own linear algebra and random numbers, and kernels of engine
# "persistent". No callbacks into Python, which a file has no business with.
_CALLS = re.compile(
    r"(lapack|cusolver|cublas|cusparse|hipsolver|hipblas|cu|hip)_\w+|Sharding|SPMD\w+Shape|annotate_device_placement|AllocateBuffer"
    r"|ApproxTopK|stablehlo\.dynamic_\w+|shape_assertion|mosaic_gpu_v2|Eigh|Qr|LuDecomposition|ProductOfElementaryHouseholderReflectors"
)


@dataclasses.dataclass(frozen=True)
class Exported:
    """Exported forwards, one per schedule shape; see [`cavs.interop.export_forward`][] and [`cavs.interop.load_forward`][].

    **Fields:** `shapes`: the schedule shapes that it runs. `cavs.schedule(batch, shapes=list(exported.shapes))` takes one of
    them where the batch fits.
    """

    shapes: tuple[Shape, ...]
    programs: tuple[Any, ...]  # a `jax.export.Exported` of each shape

    def __call__(self, params: Any, sched: Schedule, inputs: Any = None) -> Any:
        """What `forward(params, sched, inputs)` returned; `inputs` padded by `sched.pad`, both pytrees by their names.

        **Raises:** `ValueError` for a schedule of no exported shape, and for arrays that are missing, too many, or of
        another shape or dtype.
        """
        if not isinstance(sched, Schedule):
            raise TypeError(
                f"Exported: sched is a {type(sched).__name__}, wanted a cavs.Schedule. Write cavs.schedule(graphs)."
            )
        if sched.shape not in self.shapes:
            have = [(shape.graphs, shape.vertices) for shape in self.shapes]
            raise ValueError(
                f"Exported: sched has {sched.shape}, wanted one of the exported shapes, which are of (graphs, padded vertices) "
                f"{have}. Write cavs.schedule(batch, shapes=list(exported.shapes)), with as many graphs in a batch; where none "
                "fits, export a larger example."
            )
        program = self.programs[self.shapes.index(sched.shape)]
        got = {"params": named_leaves(params, "Exported: params"), "inputs": named_leaves(inputs, "Exported: inputs")}
        (want_params, _, want_inputs), _ = jax.tree.unflatten(program.in_tree, program.in_avals)
        for where, want in (("params", want_params), ("inputs", want_inputs)):
            for name in {**want, **got[where]}:
                has, wanted = (_about(tree.get(name)) for tree in (got[where], want))
                if has != wanted:
                    hint = " Inputs are padded on the host: sched.pad(rows)." if where == "inputs" else ""
                    raise ValueError(f"Exported: {where} has {has} at {name!r}, wanted {wanted}.{hint}")
        return program.call(got["params"], jnp.asarray(sched.data), got["inputs"])

    def to_bytes(self) -> bytes:
        """All of it as bytes for a file; `cavs.interop.load_forward` reads them.

        **Raises:** `ImportError` where flatbuffers, which `jax.export` writes with, is not installed.
        """
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as file:
            file.writestr("about.json", json.dumps({"shapes": self.shapes, "layout": _layout(self.shapes)}))
            for i, program in enumerate(self.programs):
                file.writestr(f"{i}.jax", bytes(program.serialize()))
        data = buffer.getvalue()
        return _MAGIC + b"%d\n" % _FORMAT + hashlib.sha256(data).digest() + data


def export_forward(
    forward: Callable[[Any, Schedule, Any], Any],
    params: Any,
    examples: Sequence[tuple[Schedule, Any]],
    *,
    platforms: Sequence[str] | None = None,
) -> Exported:
    """Compiles `forward(params, sched, inputs)` by `jax.export` for the shapes of some examples: a bucket each.

    ```python
    forward = lambda p, sched, x: cavs.run(F, p, sched, x, select=sched.roots)
    exported = cavs.interop.export_forward(forward, params, [(sched, x)])
    Path("model.cavs").write_bytes(exported.to_bytes())
    ```

    and, where F's source is not:

    ```python
    exported = cavs.interop.load_forward(Path("model.cavs").read_bytes())
    sched = cavs.schedule(batch, shapes=list(exported.shapes))
    y = exported(cavs.io.load_params("model.safetensors"), sched, sched.pad(x))
    ```

    **Arguments:**

    - `forward`: any pure function of the three, with as many `cavs.run` and readouts as there are.
    - `params`: parameters, or shapes of them (`jax.eval_shape`); their values are not exported.
    - `examples`: pairs (schedule, inputs padded by `sched.pad`), of which the shapes matter; examples of one schedule shape
      count once.
    - `platforms`: to compile for, `("cpu", "cuda")`; `None`: JAX's default here.

    **Raises:** `TypeError` or `ValueError` for examples that are no such pairs, or none; and what `forward` and `jax.export`
    raise.
    """
    if not examples:
        raise ValueError("export_forward: examples is empty, wanted pairs (sched, inputs): a shape to export each.")
    named = named_leaves(params, "export_forward: params")
    found: dict[Shape, Any] = {}
    for n, example in enumerate(examples):
        if not isinstance(example, tuple) or len(example) != 2 or not isinstance(example[0], Schedule):
            raise TypeError(f"export_forward: examples[{n}] is a {type(example).__name__}, wanted a pair (sched, inputs).")
        sched, inputs = example
        if sched.shape in found:
            continue
        trees = jax.tree.structure(params), jax.tree.structure(inputs)
        arguments = named, named_leaves(inputs, "export_forward: inputs")
        shaped = [jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree) for tree in arguments]
        flat = functools.partial(_flat, forward, sched.shape, trees, [list(tree) for tree in arguments])
        data = jax.ShapeDtypeStruct(sched.data.shape, sched.data.dtype)
        with without_callbacks():
            found[sched.shape] = jax_export.export(jax.jit(flat), platforms=platforms)(shaped[0], data, shaped[1])
    return Exported(tuple(found), tuple(found.values()))


def _flat(forward: Any, shape: Shape, trees: Any, names: Any, params: dict[str, Any], data: Any, inputs: dict[str, Any]) -> Any:
    """`forward` over leaves by their names, so that files need know nothing of a user's own containers."""
    arguments = zip(trees, names, (params, inputs), strict=True)
    params, inputs = (tree.unflatten([leaves[name] for name in own]) for tree, own, leaves in arguments)
    return forward(params, Schedule(data, shape), inputs)


def load_forward(data: bytes) -> Exported:
    """What `export_forward` made, from its bytes.

    **Load only files that you trust, as you would run only programs that you trust.** They hold code, and calling what is
    loaded runs it. A checksum finds files that were damaged, and none that somebody made to do harm: such a file may do in
    this process whatever the process may do. Keep the checksum of a file that travels, and compare it before you load.

    **Raises:** `ValueError` for bytes that are no such file, are damaged, switch off safety checks of `jax.export` or call
    what no forward needs, such as Python callbacks; or for one of a version of cavs that lays schedules out otherwise;
    `ImportError` where flatbuffers is not installed.
    """
    head, _, _ = bytes(data[:64]).partition(b"\n")
    if not head.startswith(_MAGIC):
        raise ValueError("load_forward: data is no exported forward; wanted the bytes of Exported.to_bytes().")
    if head != _MAGIC + b"%d" % _FORMAT:
        got = head.removeprefix(_MAGIC).decode("ascii", "replace")
        raise ValueError(f"load_forward: format is {got!r}, wanted {_FORMAT}: another version of cavs wrote it.")
    begin = len(head) + 1 + hashlib.sha256().digest_size
    if hashlib.sha256(data[begin:]).digest() != data[len(head) + 1 : begin]:
        raise ValueError("load_forward: data is damaged: it has not the checksum that it was written with. Copy it again.")
    try:
        with zipfile.ZipFile(io.BytesIO(data[begin:])) as file:
            about = json.loads(file.read("about.json"))
            shapes = tuple(Shape(*_tuples(s)) for s in about["shapes"])
            same = _layout(shapes) == about["layout"]
            programs = tuple(_program(file.read(f"{i}.jax"), shape) for i, shape in enumerate(shapes)) if same else ()
    except ImportError:
        raise
    except Exception as error:
        # zipfile, json, flatbuffers and jax.export raise a dozen types between them; all mean this.
        raise ValueError(
            f"load_forward: data is no forward that can be loaded ({error}); wanted the bytes of Exported.to_bytes(), "
            "made with a version of JAX that this one reads."
        ) from error
    if not same:
        raise ValueError("load_forward: another version of cavs wrote it, with other schedules. Export it again with this one.")
    return Exported(shapes, programs)


def _program(data: bytes, shape: Shape) -> Any:
    """One compiled forward, for schedules of a shape. **Raises:** many types of exceptions where it is none."""
    program = jax_export.deserialize(bytearray(data))
    if program.disabled_safety_checks:
        raise ValueError(f"safety checks are switched off in it: {program.disabled_safety_checks}")
    text = program.mlir_module()
    calls = re.findall(r'custom_call @"?([^\s"(]+)|call_target_name = "([^"]*)"', text)
    wrong = sorted({one or other for one, other in calls if not _CALLS.fullmatch(one or other)})
    if wrong or len(re.findall(r"\bstablehlo\.custom_call\b", text)) > len(calls):
        raise ValueError(f"it calls {', '.join(wrong) or 'what has no name'}, which no forward needs")
    (params, vector, inputs), _ = jax.tree.unflatten(program.in_tree, program.in_avals)
    if not (isinstance(params, dict) and isinstance(inputs, dict) and vector.shape == (length_of(shape),)):
        raise ValueError("its arguments are not parameters, a schedule of its shape, and inputs")
    return program


def _layout(shapes: Sequence[Shape]) -> str:
    """What tells whether the integers of a schedule lie where the exported code reads them."""
    return hashlib.sha256(repr([(shape._fields, layout_of(shape)) for shape in shapes]).encode()).hexdigest()


def _tuples(x: Any) -> Any:
    return tuple(_tuples(y) for y in x) if isinstance(x, list) else x


def _about(x: Any) -> str:
    return "nothing" if x is None else f"{x.dtype}{list(x.shape)}"
