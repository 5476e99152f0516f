"""The device operations of a kernel. `_mosaic.mosaic` implements them for Hopper; the tests do for Pallas' interpreter."""

import importlib
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, cast

import jax
import numpy as np

from cavs.kernels._layout.config import LaunchConfig
from cavs.kernels._layout.pack import PackedWeight
from cavs.kernels._layout.specs import ProductSpec, Tile
from cavs.kernels._program.arrays import Ref

Weights: TypeAlias = Any  # a thread block's packed weights, in memory or in registers, in the form that the device has for them
ProductRows: TypeAlias = Any  # the rows that products read, in the form that the device has for them


class Device(Protocol):
    """A module with these functions; `_mosaic.mosaic` documents them."""

    def sync(self) -> None: ...

    def begin_exchange(self, ring: Sequence[Ref], config: LaunchConfig) -> None: ...

    def end_exchange(self, ring: Sequence[Ref]) -> None: ...

    def begin_ring(self, ring: Ref, config: LaunchConfig) -> None: ...

    def group_barrier(self, counters: Ref, slot: jax.Array, target: jax.Array, spins: int) -> None: ...

    def mark_unwritten(self, outputs: Sequence[jax.ShapeDtypeStruct], after: jax.Array) -> list[jax.Array]: ...

    def pack_weights(
        self,
        parts: Sequence[PackedWeight],
        weights: Sequence[jax.Array],
        inverses: Sequence[jax.Array | None],
        unit: int,
        config: LaunchConfig,
    ) -> jax.Array: ...

    def copy_weights(self, packed: Ref, cta: jax.Array, target: Ref, config: LaunchConfig) -> None: ...

    def number(self, tile: Tile, index: Ref) -> jax.Array: ...

    def load(
        self,
        tile: Tile,
        dtype: np.dtype,
        ref: Ref,
        index: jax.Array | None,
        base: jax.Array,
        column: jax.Array,
        wide: bool = True,
    ) -> jax.Array: ...

    def prefetch(self, tile: Tile, ref: Ref, base: jax.Array, column: jax.Array) -> None: ...

    def segments(
        self,
        tile: Tile,
        dtype: np.dtype,
        ref: Ref,
        index: Ref | None,
        first: Ref,
        count: Ref,
        base: jax.Array,
        column: jax.Array,
        largest: bool,
        wide: bool = True,
        offset: jax.Array | None = None,
    ) -> jax.Array: ...

    def whole_rows(
        self, tile: Tile, dtype: np.dtype, ref: Ref, base: jax.Array, unit: int, valid: int, operation: str
    ) -> jax.Array: ...

    def store(
        self,
        tile: Tile,
        ref: Ref,
        value: jax.Array,
        base: jax.Array,
        column: jax.Array,
        valid: jax.Array | None = None,
        awaited: bool = False,
    ) -> None: ...

    def read_product(self, tile: Tile, part: Ref | None, slots: int, column: jax.Array | int) -> jax.Array: ...

    def product_rows(self, tile: Tile, indices: Sequence[Ref | None], bases: Sequence[jax.Array]) -> ProductRows: ...

    def hold_weights(self, specs: Sequence[ProductSpec], weights: Ref) -> Weights: ...

    def product(
        self,
        tile: Tile,
        specs: Sequence[ProductSpec],
        refs: Sequence[Ref],
        numbers: ProductRows,
        weights: Weights,
        part: Ref,
        cta: jax.Array,
        counters: Ref,
        ring: Ref | None = None,
    ) -> None: ...

    def wide_product(
        self,
        tile: Tile,
        specs: Sequence[ProductSpec],
        refs: Sequence[Ref],
        indices: Sequence[Ref | None],
        bases: Sequence[jax.Array],
        weights: Ref,
        part: Ref,
        ring: Ref,
        cta: jax.Array,
    ) -> None: ...


def device_of(config: LaunchConfig) -> Device:
    """Returns the module whose device operations a launch runs."""
    return cast(Device, importlib.import_module(config.interpret or "cavs.kernels._mosaic.mosaic"))
