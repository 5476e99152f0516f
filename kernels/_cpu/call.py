"""`native_call`: a call of the library of engine `native`, inside a compiled program.

`jax.ffi.ffi_call` writes the call's attributes where some of XLA's simplifications of empty arrays lose them (jaxlib 0.10.2 to
0.11.2: "No registered implementation for untyped custom call"). This primitive lowers in the same way and writes them where
XLA keeps them.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend import core as jex
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

native_call_p = jex.Primitive("native_call")
native_call_p.multiple_results = True


def native_call(
    target: str,
    results: Sequence[jax.ShapeDtypeStruct],
    arrays: Sequence[jax.Array],
    program: np.ndarray,
    aliases: Mapping[int, int] | None = None,
) -> list[jax.Array]:
    """Calls a handler of the library. It has no rules for `jax.vmap` and `jax.jvp`.

    Args:
        target: The name of the handler.
        results: The shapes and dtypes of the results.
        arrays: The operands.
        program: (n,) int32, what the handler does.
        aliases: The numbers of operands that become results, and of these results.
    """
    shapes = tuple((x.shape, np.dtype(x.dtype)) for x in results)
    pairs = tuple(sorted((aliases or {}).items()))
    return native_call_p.bind(*arrays, target=target, results=shapes, program=program.tobytes(), input_output_aliases=pairs)


@native_call_p.def_impl
def _run(*operands: Any, **params: Any) -> list[jax.Array]:
    return jax.jit(functools.partial(native_call_p.bind, **params))(*operands)


@native_call_p.def_abstract_eval
def _result_types(*operands: Any, results: tuple[Any, ...], **_: Any) -> list[ShapedArray]:
    mesh = jax.sharding.get_abstract_mesh()
    types = [ShapedArray(shape, dtype) for shape, dtype in results]
    return types if mesh.empty else [x.update(sharding=NamedSharding(mesh, PartitionSpec(*[None] * x.ndim))) for x in types]


def _lower(
    ctx: Any, *operands: Any, target: str, program: bytes, input_output_aliases: Sequence[tuple[int, int]], **_: Any
) -> Any:
    rule = jax.ffi.ffi_lowering(target, operand_output_aliases=dict(input_output_aliases))
    results: Any = rule(ctx, *operands, program=np.frombuffer(program, np.int32))
    call: Any = results[0].owner
    call.attributes["api_version"] = mlir.i32_attr(4)
    call.attributes["backend_config"] = call.attributes["mhlo.backend_config"]
    del call.attributes["mhlo.backend_config"]
    return results


mlir.register_lowering(native_call_p, _lower, platform="cpu")
