"""All levels of a pass in one launch, weights on chip (VPPS section III; MegaKernels): a kernel from a `LevelProgram`.

The grid consists of `groups` groups of thread blocks; a group is one virtual processor of VPPS. Its j-th thread block owns
units j*hb to (j+1)*hb of every vector and keeps the weights' columns for them in shared memory for the whole launch. Groups
run graphs of their own, so they never wait for each other. If there are fewer graphs than groups, they can share the rows of
every level, and all thread blocks then synchronise before each level (`LaunchConfig.spread`). Within a group, the thread blocks
synchronise before a product reads rows of another thread block (see `_program.phases`), or the product polls the rows that it
reads (`LaunchConfig.dataflow`: dependencies finer than a level; MegaKernels, sections 4.2 and 6). Very wide levels, which are
ordinary large products, have a launch of their own (`_body.wide`).
"""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cavs.kernels._body.device import device_of
from cavs.kernels._body.kernel import run as run_levels
from cavs.kernels._body.launch import Buffers, Launch
from cavs.kernels._body.narrow import Narrow
from cavs.kernels._body.wide import Wide
from cavs.kernels._layout.config import EXCHANGE_WORDS, RING_WORDS, LaunchConfig
from cavs.kernels._layout.layout import Layout, layout_of
from cavs.kernels._layout.pack import pack_ring
from cavs.kernels._program.arrays import Arrays as Arrays, Output as Output, Ref, concatenated
from cavs.kernels._program.jaxprs import ROW, Var
from cavs.kernels._program.names import EDGE_OWNER, FIRST_EDGE, Index, Tensor
from cavs.kernels._program.operations import LevelProgram
from cavs.kernels._program.widths import UNWRITTEN
from cavs.kernels.target import HOPPER, Target
from cavs.kernels.turns import begin_p, end_p

Weights: TypeAlias = dict[Var, jax.Array]
LaunchResults: TypeAlias = tuple[dict[Tensor, jax.Array], jax.Array]  # the tensors that a launch writes, and its flag


def launches(
    program: LevelProgram, configs: list[LaunchConfig], weights: Weights, arrays: Arrays, reverse: bool
) -> LaunchResults:
    """Runs all levels, in one launch or two (`_body.wide`).

    The launches take one batch: see `cavs._run.compiled`.

    Returns:
        The tensors written, by name, with the copies of 16 bits of those updated; and (1,) int32, nonzero if a thread block
        gave up waiting.
    """
    flows, variables = any(config.dataflow for config in configs), list(weights)

    # One equation for JAX, without a batching rule. `jax.checkpoint` cuts what it runs again to what is read, and a kernel that
    # writes to references has no outputs that anybody reads.
    @jax.custom_batching.custom_vmap
    def run(values: list[jax.Array], leaves: list[list[jax.Array]]) -> LaunchResults:
        weights, inputs = dict(zip(variables, values, strict=True)), arrays.with_values(leaves)
        out, lost = _launch(program, configs[0], weights, inputs, reverse, flows, len(configs) > 1)
        for config in configs[1:]:
            out, late = _launch(program, config, weights, dataclasses.replace(inputs, updated=out), reverse, flows, True)
            lost = lost + late
        inner = program.scratch.keys() | program.halves.keys() - arrays.updated.keys()
        return {name: x for name, x in out.items() if name not in inner}, lost

    @run.def_vmap
    def batches(*_: object) -> NoReturn:
        raise NotImplementedError("launches: jax.vmap around a launch; cavs.run batches by engine scan (`cavs._run.compiled`).")

    return run(*_not_differentiated((list(weights.values()), arrays.values())))


@jax.custom_jvp
def _not_differentiated(x: Any) -> Any:
    return x


@_not_differentiated.defjvp
def _no_derivative(*_: object) -> NoReturn:
    raise TypeError('run: engine "persistent" has no second derivative. Write cavs.run(..., engine="scan").')


def _launch(
    program: LevelProgram, config: LaunchConfig, weights: Weights, arrays: Arrays, reverse: bool, flows: bool, shared: bool
) -> LaunchResults:
    """Runs one launch: all levels, or if they are `shared` with another launch, those of its `LaunchConfig.wide`."""
    from jax.experimental.pallas import mosaic_gpu as plgpu  # not every supported JAX has all of these

    layout, blocks = layout_of(program, config), program.unit // config.hb
    # One vector of integers: parts of the schedule's own would not be aligned as XLA needs a kernel's operands to be.
    integers, integer_places = concatenated(arrays.integers, jnp.int32)
    constants, constant_places = concatenated(arrays.constants, jnp.float32)
    outputs = arrays.outputs | _scratch_outputs(program, arrays)
    packed = _packed_weights(program, config, layout, weights, arrays.constants)
    held = {name: jax.new_ref(x) for name, x in arrays.updated.items()}
    counters = begin_p.bind(jnp.zeros(32 * (config.groups + 1), jnp.int32))
    shapes = {name: jax.ShapeDtypeStruct((out.rows, out.width), out.dtype) for name, out in outputs.items()}
    if awaited := [name for name in outputs if flows and name in program.exchanged() and name not in held]:
        # Filled after the previous launch: otherwise XLA fills those of several steps while a launch runs, and delays it.
        filled = device_of(config).mark_unwritten([shapes[name] for name in awaited], counters)
        held |= {name: jax.new_ref(x) for name, x in zip(awaited, filled, strict=True)}
    counted = jax.new_ref(counters)
    fresh = {name: shape for name, shape in shapes.items() if name not in held}
    names = _Names(
        list(arrays.tensors), bool(packed), list(held), list(fresh), integer_places, constant_places, arrays.replaced
    )
    scratch = _scratch_memory(config, layout)

    def body(*refs: Ref) -> None:
        launch = Launch(program, config, layout, names.buffers(refs, list(scratch)), outputs, reverse, shared)
        run_levels((Wide if config.wide else Narrow)(launch))

    body.__name__ = ("cavs_backward" if reverse else "cavs_forward") + "_wide" * config.wide
    kernel = plgpu.kernel(
        body,
        out_type=list(fresh.values()),
        scratch_types=list(scratch.values()),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=getattr(plgpu, "InterpretGPUParams")() if config.interpret else None,  # noqa: B009  (of jax 0.11)
        **_grid(config, blocks, config.split),
    )
    out = kernel(*arrays.tensors.values(), *packed, constants[None], integers, *held.values(), counted)
    left = {name: jax.freeze(ref) for name, ref in held.items()}
    lost = end_p.bind(jax.freeze(counted)[:1])
    return dict(zip(fresh, out, strict=True)) | left, lost


def _scratch_outputs(program: LevelProgram, arrays: Arrays) -> dict[Tensor, Output]:
    """The tensors for values between phases, of as many rows or edges as the batch has."""
    rows, edges = (arrays.integers[index].shape[0] for index in (FIRST_EDGE, EDGE_OWNER))
    return {
        name: Output(rows if scratch.domain == ROW else edges, scratch.width, scratch.dtype, scratch.domain)
        for name, scratch in program.scratch.items()
    }


def _packed_weights(
    program: LevelProgram, config: LaunchConfig, layout: Layout, weights: Weights, constants: Mapping[Tensor, jax.Array]
) -> list[jax.Array]:
    """The kernel's operand for the weights, packed in the order in which products read them; none without products."""
    given = [weights[p.variable] for p in layout.packed]
    if config.wide:
        return [pack_ring(layout.packed, given, program.unit, config.hb, config.precision)]
    inverses = [constants[program.scales[p.variable]] if p.variable in program.scales else None for p in layout.packed]
    return [device_of(config).pack_weights(layout.packed, given, inverses, program.unit, config)] if given else []


def _scratch_memory(config: LaunchConfig, layout: Layout) -> dict[str, Any]:
    """The kernel's shared memory, by the fields of `Buffers`."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if not layout.columns:
        return {}
    scratch: dict[str, Any] = {"sums": plgpu.SMEM(layout.part(config), jnp.float32)}
    if config.resident:
        scratch["resident"] = plgpu.SMEM((layout.words,), jnp.float32)
    words = RING_WORDS if config.wide else config.warpgroups * EXCHANGE_WORDS if config.split > 1 else 0
    if words:
        scratch["ring"] = plgpu.SMEM((words,), jnp.int32)
    return scratch


def _grid(config: LaunchConfig, blocks: int, cluster: int) -> dict[str, Any]:
    """The kernel's grid, clusters and warpgroups, as arguments of `plgpu.kernel`."""
    grid = {"group": config.groups} | ({"cluster": blocks // cluster} if cluster < blocks else {})
    shape: dict[str, Any] = {"grid": tuple(grid.values()), "grid_names": tuple(grid)}
    if cluster > 1:
        shape |= {"cluster": (cluster,), "cluster_names": ("peer",)}
    if config.warpgroups > 1:
        shape |= {"num_threads": config.warpgroups, "thread_name": "wg"}
    return shape


@dataclasses.dataclass(frozen=True)
class _Names:
    """The names of a kernel's references, in their order."""

    tensors: list[Tensor]
    weights: bool
    held: list[Tensor]  # tensors that are read and written
    fresh: list[Tensor]  # tensors that are written
    integers: Mapping[Index, tuple[int, int]]
    constants: Mapping[Tensor, tuple[int, int]]
    replaced: Mapping[Tensor, Tensor]

    def buffers(self, refs: tuple[Ref, ...], scratch: list[str]) -> Buffers:
        """The references by name; after those of arrays follow those of shared memory."""
        from jax.experimental import pallas as pl

        rest = iter(refs)
        tensors = {name: next(rest) for name in self.tensors}
        weights = next(rest) if self.weights else None
        constants, integers = next(rest), next(rest)
        tensors |= {name: next(rest) for name in self.held}
        counters = next(rest)
        tensors |= {name: next(rest) for name in self.fresh}
        tensors |= {name: tensors[by] for name, by in self.replaced.items()}
        vectors = {name: integers.at[pl.ds(begin, size)] for name, (begin, size) in self.integers.items()}
        tensors |= {name: constants.at[:, pl.ds(begin, size)] for name, (begin, size) in self.constants.items()}
        shared = dict.fromkeys(("sums", "resident", "ring")) | dict(zip(scratch, rest, strict=True))
        return Buffers(tensors, vectors, counters, weights, **shared)


def checked(x: jax.Array, lost: jax.Array) -> jax.Array:
    """Returns `x`, or NaN (the least integer) everywhere if a thread block gave up waiting."""
    if x.dtype == bool:
        return x
    return jnp.where(lost[0] == 0, x, jnp.nan if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.iinfo(x.dtype).min)


def unwritten(shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """Returns an array of `UNWRITTEN`, which products poll (`LaunchConfig.dataflow`)."""
    bits = UNWRITTEN if np.dtype(dtype).itemsize == 4 else UNWRITTEN.astype(np.int16)
    return jnp.full(shape, lax.bitcast_convert_type(bits, dtype))


def cure() -> str:
    """Returns how to get the JAX that the kernels need."""
    if sys.version_info < (3, 12):
        version = ".".join(map(str, sys.version_info[:2]))
        return f"jax 0.11 needs Python 3.12, and this is Python {version}: install cavs in an environment of Python 3.12"
    return "Write: pip install --upgrade 'jax[cuda13]'"


def held_back(target: Target) -> bool:
    """Returns whether only an old version of JAX prevents the kernels from running: the GPU is a Hopper."""
    return target.is_hopper and _jax_is_old()


def _jax_is_old() -> bool:
    return tuple(int(x) for x in jax.__version__.split(".")[:2]) < (0, 11)


def unsupported(target: Target) -> str | None:
    """Returns why the kernels cannot run on a device, or `None` if they can."""
    if _jax_is_old():
        return f"its kernels need jax 0.11 or newer, and this is {jax.__version__}. {cure()}"
    if target.is_hopper:
        return None
    here = f"this one has {target.capability}" if target.is_gpu else f"JAX runs on {target.platform!r} here"
    return f"its kernels need an NVIDIA GPU of compute capability {HOPPER} (Hopper), and {here}"
