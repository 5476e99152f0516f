"""`load_forward`: reads exported forward passes, and refuses files that no export wrote."""

import hashlib
import io
import json
import os
import re
import zipfile
from collections.abc import Sequence
from typing import Any

import jax
from jax import export as jax_export

from cavs._graphs.pytree import PyTree
from cavs._interop.exported import FORMAT, MAGIC, Exported, layout_hash
from cavs._interop.serve import EDGE, GRAPH, VERTEX, WHOLE, Serving
from cavs._schedule.shape import Shape, length_of

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
        hint = (
            "Write load_forward(pathlib.Path(path).read_bytes())"
            if isinstance(data, str | os.PathLike)
            else "Open the file as 'rb'"
        )
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


def _load_serving(found: Any, programs: Sequence[jax_export.Exported]) -> Serving | None:
    """What `about.json` says about inputs and outputs. Raises many types of exceptions if it is invalid."""
    if found is None:
        return None
    inputs, outputs = dict(found[0]), tuple(found[1])
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
    wrong = sorted({one or other for one, other in calls if not _CALLS.fullmatch(one or other)})
    if wrong or len(re.findall(r"\bstablehlo\.custom_call\b", text)) > len(calls):
        raise ValueError(f"it calls {', '.join(wrong) or 'a function without a name'}, which no forward pass needs")
    (params, vector, inputs), _ = jax.tree.unflatten(program.in_tree, program.in_avals)
    if not (isinstance(params, dict) and isinstance(inputs, dict) and vector.shape == (length_of(shape),)):
        raise ValueError("its arguments are not parameters, a schedule of its shape, and inputs")
    return program


def _tuples(x: PyTree) -> PyTree:
    """Converts nested lists, as JSON has them, to tuples."""
    return tuple(_tuples(y) for y in x) if isinstance(x, list) else x
