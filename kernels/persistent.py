"""All levels of a pass in one launch, weights on chip (VPPS section III; MegaKernels): a kernel from a `Level` program.

The grid is `groups` groups of CTAs; a group is one virtual processor of VPPS. Its CTA j owns units j*hb ... of every
vector and keeps the weights' columns for them in shared memory for the whole launch. Groups take graphs of their own, so
they never wait for each other; within a group the CTAs meet where a product reads what others stored (see `_program.phases`),
or a product waits for the numbers themselves (`Config.dataflow`: dependencies finer than a level; MegaKernels, sections 4.2
and 6). Levels so wide that they are ordinary large products have a launch of their own (`_body.wide`).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cavs.kernels._body.kernel import Kernel
from cavs.kernels._body.wide import WideKernel
from cavs.kernels._layout.layout import EXCHANGE_WORDS, RING_WORDS, Config, layout_of
from cavs.kernels._layout.pack import pack_ring, pack_weights
from cavs.kernels._program.specs import ROW, UNWRITTEN, UNWRITTEN_HALF, Arrays as Arrays, Level, Made as Made, concatenated
from cavs.kernels.turns import begin_p, end_p


def launches(
    level: Level, configs: list[Config], weights: dict[Any, Any], arrays: Arrays, reverse: bool
) -> tuple[dict[str, Any], Any]:
    """Runs all levels, in one launch or two (`_body.wide`). Returns the tensors written, by name, and (1,) int32, not 0 where a
    wait was given up. They take one batch: see `cavs._run.vmap`."""
    flows, variables = any(config.dataflow for config in configs), list(weights)
    named = {name: getattr(arrays, name) for name in ("tensors", "constants", "integers", "updated")}

    # One equation for JAX, which has no batches: what `jax.checkpoint` runs again it cuts to what is read, and a kernel that
    # writes to references has no outputs that anybody reads.
    @jax.custom_batching.custom_vmap
    def run(values: list[Any], given: list[list[Any]]) -> tuple[dict[str, Any], Any]:
        weights = dict(zip(variables, values, strict=True))
        mine = dataclasses.replace(
            arrays, **{k: dict(zip(named[k], x, strict=True)) for k, x in zip(named, given, strict=True)}
        )
        out, lost = _launch(level, configs[0], weights, mine, reverse, flows, len(configs) > 1)
        for config in configs[1:]:
            out, late = _launch(level, config, weights, dataclasses.replace(mine, updated=out), reverse, flows, True)
            lost = lost + late
        inner = level.scratch.keys() | level.halves.keys()
        return {name: x for name, x in out.items() if name not in inner}, lost

    @run.def_vmap
    def batches(*_: Any) -> Any:
        raise NotImplementedError("launches: jax.vmap around a launch; cavs.run batches by engine scan (`cavs._run.vmap`).")

    given = [list(x.values()) for x in named.values()]  # lists, as JAX would sort dicts: their order is that in memory
    return run(*_not_differentiated(([weights[v] for v in variables], given)))


@jax.custom_jvp
def _not_differentiated(x: Any) -> Any:
    return x


@_not_differentiated.defjvp
def _no_derivative(*_: Any) -> Any:
    raise TypeError('run: engine "persistent" has no second derivative. Write cavs.run(..., engine="scan").')


def _launch(
    level: Level, config: Config, weights: dict[Any, Any], arrays: Arrays, reverse: bool, flows: bool, shared: bool
) -> tuple[dict[str, Any], Any]:
    """One launch; its levels are all, or where they are `shared` with another those of its `Config.wide`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu  # not every JAX that cavs runs on has all of it

    layout, ctas = layout_of(level, config), level.unit // config.hb
    rows_padded, edges_padded = (arrays.integers[k].shape[0] for k in ("first", "edge_owner"))
    # One vector of integers: parts of the schedule's own would not be aligned as XLA wants a kernel's operands.
    integers, places = concatenated(arrays.integers, jnp.int32)
    constants, constant_places = concatenated(arrays.constants, jnp.float32)
    made = dict(arrays.made)
    for name, (domain, width, dtype) in level.scratch.items():
        made[name] = Made(rows_padded if domain == ROW else edges_padded, width, dtype, domain)
    given = [weights[p.variable] for p in layout.packed]
    if config.wide:
        held_weights = {"packed": pack_ring(layout.packed, given, level.unit, config.hb, config.precision)}
    elif config.resident:
        held_weights = {f"weight{n}": w for n, w in enumerate(given)}
    else:
        held_weights = {"packed": pack_weights(layout.packed, given, level.unit, config.hb, config.precision)}
    names = [*arrays.tensors, *held_weights, "constants", "integers"]
    held = {name: jax.new_ref(x) for name, x in arrays.updated.items()}
    counters = begin_p.bind(jnp.zeros(32 * (config.groups + 1), jnp.int32))
    if flows:  # filled after the launch before: XLA would fill those of several steps at once, beside a launch, which delays it
        for n, name in enumerate(name for name in made if name in level.exchanged() and name not in held):
            m = made[name]
            held[name] = jax.new_ref(unwritten((m.rows, m.width), m.dtype, integers[n] + counters[n]))
    held["counters"] = jax.new_ref(counters)
    mutable, fresh = list(held), {name: m for name, m in made.items() if name not in held}
    out_type = [jax.ShapeDtypeStruct((m.rows, m.width), m.dtype) for m in fresh.values()]

    def body(*refs: Any) -> None:
        count = len(names) + len(mutable)
        table = dict(zip([*names, *mutable], refs[:count], strict=True))
        table |= dict(zip(fresh, refs[count : count + len(fresh)], strict=True))
        table |= {k: table["integers"].at[pl.ds(begin, size)] for k, (begin, size) in places.items()}
        table |= {k: table["constants"].at[:, pl.ds(begin, size)] for k, (begin, size) in constant_places.items()}
        scratch = list(refs[count + len(fresh) :])
        (WideKernel if config.wide else Kernel)(level, config, layout, table, made, scratch, reverse, shared).run()

    body.__name__ = ("cavs_backward" if reverse else "cavs_forward") + "_wide" * config.wide
    scratch = []
    if layout.columns:
        scratch.append(plgpu.SMEM(layout.part(config), jnp.float32))
        if config.resident:
            scratch.append(plgpu.SMEM((layout.words,), jnp.float32))
        words = RING_WORDS if config.wide else config.warpgroups * EXCHANGE_WORDS if config.split > 1 else 0
        if words:
            scratch.append(plgpu.SMEM((words,), jnp.int32))
    cluster = config.cluster(level.unit)
    grid = {"group": config.groups} | ({"cluster": ctas // cluster} if cluster < ctas else {})
    shape: dict[str, Any] = {"grid": tuple(grid.values()), "grid_names": tuple(grid)}
    if cluster > 1:
        shape |= {"cluster": (cluster,), "cluster_names": ("peer",)}
    if config.warpgroups > 1:
        shape |= {"num_threads": config.warpgroups, "thread_name": "wg"}
    kernel = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=getattr(plgpu, "InterpretGPUParams")() if config.interpret else None,  # noqa: B009  (of jax 0.11)
        **shape,
    )
    operands = [*arrays.tensors.values(), *held_weights.values(), constants[None], integers]
    out = kernel(*operands, *held.values())
    left = {name: jax.freeze(ref) for name, ref in held.items()}
    lost = end_p.bind(left.pop("counters")[:1])
    return dict(zip(fresh, out, strict=True)) | left, lost


def checked(x: Any, lost: Any) -> Any:
    """NaN (the least of integers) everywhere if a wait was given up: a wrong result never looks like a right one."""
    if x.dtype == bool:
        return x
    return jnp.where(lost[0] == 0, x, jnp.nan if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.iinfo(x.dtype).min)


def unwritten(shape: tuple[int, ...], dtype: Any, count: Any = 0) -> Any:
    """Numbers that products wait for (`Config.dataflow`). With a `count`, a number that is known at run time and not negative,
    XLA cannot tell that these are the same as others, of which it would make copies."""
    bits = UNWRITTEN if dtype == jnp.float32 else UNWRITTEN_HALF
    return jnp.broadcast_to(lax.bitcast_convert_type(bits + jnp.minimum(count, 0).astype(bits.dtype), dtype), shape)


def supported() -> str | None:
    """Why the kernels cannot run here; `None` where they can."""
    if tuple(int(x) for x in jax.__version__.split(".")[:2]) < (0, 11):
        return f"they need jax 0.11 or newer, and this is {jax.__version__}"
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"they need an NVIDIA GPU of compute capability 9.0 (Hopper), and JAX runs on {device.platform!r} here"
    capability = str(getattr(device, "compute_capability", ""))
    if capability != "9.0":
        return f"they need an NVIDIA GPU of compute capability 9.0 (Hopper), and this one has {capability}"
    return None
