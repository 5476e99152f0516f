"""The softmax over a vocabulary, a block of rows at a time: its logits are often the largest tensor of a network.

From the logits to the loss, all equations treat the rows (tokens, sequences) alike, until a sum adds the rows up. So a loop
over blocks of rows computes the loss. It computes the gradients, too, while the logits of a block are there: they are not kept,
and their product does not run again.
"""

import math
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from cavs._jaxpr.costs import bytes_of_var
from cavs._jaxpr.equations import bind, depends, is_float, reads, run_equations, values
from cavs._jaxpr.inline import JITTED, inlined
from cavs._jaxpr.jaxprs import Atom, Env, Eqn, Var, is_var, opened
from cavs._memory.sub_batches import summed_over_parts
from cavs.kernels import ELEMENTWISE

# Primitives that act on each element alone: those that the kernels compute, and those that engine `persistent` rewrites.
_ELEMENTWISE = ELEMENTWISE | {"cbrt", "erfc", "expm1", "is_finite", "log1p", "pow", "tan"}
_LARGE = 1 << 20  # bytes of logits that are worth a loop
_ROWS = 512  # of a block, at least: for products of fewer, the sum of the weights' gradients would take most of the time
_WIDE = 8  # other values are computed by blocks, too, if they have this share of the logits' bytes
_SHAPES = {  # parameters that contain shapes
    "broadcast_in_dim": "shape", "iota": "shape", "reshape": "new_sizes", "slice": "limit_indices", "gather": "slice_sizes",
}  # fmt: skip
_REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_or", "reduce_and", "argmax", "argmin"}


def in_blocks_of_rows(closed: Any) -> Any:
    """Returns a closed jaxpr that computes the loss of its largest product by blocks of rows; the same one if it cannot."""
    jaxpr, consts = opened(closed)
    eqns, outs = inlined(jaxpr, JITTED)
    head = largest_loss(eqns, outs) if jax.sharding.get_abstract_mesh().size <= 1 else None
    if head is None:  # among several devices, each block would add up the gradients of weights
        return closed

    def function(*args: Any) -> list[Any]:
        env: Env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        run_equations([e for e in eqns if head.follow.isdisjoint(e.outvars)], env)
        env.update(zip(head.sums, _summed(head, values(head.shared, env), values(head.rows, env)), strict=True))
        run_equations(head.after, env)
        return values(outs, env)

    return jax.make_jaxpr(function)(*(v.aval for v in jaxpr.invars))


class RowLoss:
    """A loss that runs by blocks of rows: what follows from a product, and what only that needs for values as large.

    Attributes:
        count: the number of blocks.
        size: the number of rows.
        axis: for each value inside, and each of `rows`, its axis of rows. It may have several elements for each row.
        follow: all values that follow from the product.
        sums: the results, sums over all rows; one of them is a float.
        inside: the equations of a block, in order; `after`: those that follow from the sums.
        shared: the values that all blocks read.
        rows: the values of which a block reads its rows.
    """

    def __init__(self, eqns: list[Eqn], product: Eqn, count: int):
        self._logits = logits = product.outvars[0]
        self.count, self.size, self.axis = count, logits.aval.shape[0], {logits: 0}
        self.follow, self.sums = depends(eqns, {logits}), list[Var]()
        self._large, self._found = bytes_of_var(logits) / _WIDE, set[int]()
        self._made = {v: e for e in eqns for v in e.outvars}

    def complete(self, eqns: list[Eqn], outs: Sequence[Atom]) -> bool:
        """Finds the equations inside. Returns whether they treat all rows alike until a sum adds them up."""
        for eqn in eqns:
            reads_rows = any(is_var(x) and x in self.axis and x in self.follow for x in eqn.invars)
            if (reads_rows or self._logits in eqn.outvars) and not self._add(eqn):
                return False
        self.inside = [e for e in eqns if id(e) in self._found]
        self.after = [e for e in eqns if id(e) not in self._found and not self.follow.isdisjoint(e.outvars)]
        results = {v for e in self.inside for v in e.outvars}
        inputs = [v for v in dict.fromkeys(x for e in self.inside for x in e.invars if is_var(x)) if v not in results]
        self.shared, self.rows = ([v for v in inputs if (v in self.axis) == is_row] for is_row in (False, True))
        floats = [v.aval.shape for v in self.sums if is_float(v)]
        read_later = reads(self.after, outs) & results & self.follow
        return read_later.issubset(self.sums) and self.follow.isdisjoint(inputs) and floats == [()]

    def _add(self, eqn: Eqn) -> bool:
        """Adds an equation that reads rows. Returns whether it treats all rows alike, or adds them up."""
        (out,) = eqn.outvars if len(eqn.outvars) == 1 else (None,)
        if out is None or any(is_var(x) and x in self.sums for x in eqn.invars):
            return False
        known = [self.axis.get(x) if is_var(x) and x in self.follow else None for x in eqn.invars]
        if eqn.primitive.name == "reduce_sum" and known[0] in eqn.params["axes"]:
            self.sums.append(out)
            self._found.add(id(eqn))
            return True
        for axis in [self.axis[out]] if out in self.axis else range(len(out.aval.shape)):
            axes = _operand_axes(eqn, axis)
            is_divided = not out.aval.shape[axis] % self.size
            if is_divided and axes is not None and all(k is None or k == a for k, a in zip(known, axes, strict=True)):
                self.axis[out] = axis
                self._found.add(id(eqn))
                return all(self._divide(x, a) for x, a in zip(eqn.invars, axes, strict=True) if a is not None)
        return False

    def _divide(self, x: Atom, axis: int) -> bool:
        """Divides the rows of a value that equations inside read; computes it there if it is large. Returns whether it can."""
        if not is_var(x):
            return False
        if x in self.axis or x.aval.shape[axis] % self.size:
            return self.axis.get(x) == axis
        self.axis[x] = axis
        eqn = self._made.get(x)
        if eqn is None or bytes_of_var(x) < self._large or eqn.primitive.name not in _ELEMENTWISE | {*_SHAPES}:
            return True
        axes = _operand_axes(eqn, axis)
        if axes is None:
            return True
        self._found.add(id(eqn))
        return all(self._divide(y, a) for y, a in zip(eqn.invars, axes, strict=True) if a is not None)

    def run(self, args: Sequence[Any]) -> list[Any]:
        """Returns the sums over one block, from the shared values and rows."""
        env: Env = dict(zip([*self.shared, *self.rows], args, strict=True))
        run_equations(self.inside, env, lambda e, operands: bind(self._of_block(e), operands))
        return values(self.sums, env)

    def _of_block(self, eqn: Eqn) -> Eqn:
        """Returns an equation for the rows of one block."""
        name = _SHAPES.get(eqn.primitive.name)
        axis = self.axis.get(cast(Var, eqn.invars[0] if name == "slice_sizes" else eqn.outvars[0]))
        if name is None or axis is None or eqn.params[name][axis] == 1:
            return eqn
        shape = [n // self.count if i == axis else n for i, n in enumerate(eqn.params[name])]
        return eqn.replace(params={**eqn.params, name: tuple(shape)})

    def block(self, v: Var, x: Any) -> Any:
        """Returns the rows of a value with a leading axis of blocks.

        A block has every `count`-th row. If devices have consecutive rows each, all of them compute a part of each block.
        """
        axis, shape = self.axis[v], x.shape
        x = x.reshape(*shape[:axis], self.size // self.count, self.count, -1, *shape[axis + 1 :])
        return jnp.moveaxis(x, axis + 1, 0).reshape(self.count, *shape[:axis], -1, *shape[axis + 1 :])


def largest_loss(eqns: list[Eqn], outs: Sequence[Atom]) -> RowLoss | None:
    """Returns the equations from the largest product to sums over its rows; `None` if it is small or indivisible."""
    products = [e for e in eqns if e.primitive.name == "dot_general" and is_float(e.outvars[0])]
    product = max(products, key=lambda e: bytes_of_var(e.outvars[0]), default=None)
    if product is None or any(e.effects for e in eqns) or bytes_of_var(logits := product.outvars[0]) < _LARGE:
        return None
    axes, shape = _operand_axes(product, 0), logits.aval.shape
    weights = [bytes_of_var(x) for x, axis in zip(product.invars, axes or (), strict=False) if axis is None]
    counts = [n for n in range(2, math.prod(shape[:-1]) // _ROWS + 1) if shape[0] % n == 0]
    # Blocks need no less than the sum of the weights' gradients, to which each of them adds.
    count = next((n for n in counts if bytes_of_var(logits) <= n * max(weights, default=0)), max(counts, default=None))
    head = None if not weights or count is None else RowLoss(eqns, product, count)
    return head if head is not None and head.complete(eqns, outs) else None


def _operand_axes(eqn: Eqn, axis: int) -> list[int | None] | None:
    """Returns for each operand the axis that an axis of the result goes through, `None` if it does not read by rows.

    `None` if the equation is not known to treat the elements along this axis alike.
    """
    name, params, shape = eqn.primitive.name, eqn.params, eqn.outvars[0].aval.shape
    shapes = [x.aval.shape for x in eqn.invars]
    if params.get("sharding") is not None or params.get("out_sharding") is not None:
        return None
    if name in _ELEMENTWISE:
        return [axis if s else None for s in shapes] if all(s in ((), shape) for s in shapes) else None
    if name == "iota":
        return [] if params["dimension"] != axis else None
    if name == "broadcast_in_dim" and len(shapes) == 1:
        at = params["broadcast_dimensions"].index(axis) if axis in params["broadcast_dimensions"] else None
        return [None if at is None or shapes[0][at] != shape[axis] else at]
    if name == "reshape":  # the elements of a row stay together
        return [0] if axis == 0 and shapes[0] else None
    if name == "slice":
        is_whole = params["start_indices"][axis] == 0 and params["limit_indices"][axis] == shapes[0][axis]
        return [axis] if is_whole and (params["strides"] is None or params["strides"][axis] == 1) else None
    if name == "transpose":
        return [params["permutation"][axis]]
    if name in _REDUCTIONS or name == "squeeze":
        removed = params["dimensions" if name == "squeeze" else "axes"]
        return [[i for i in range(len(shapes[0])) if i not in removed][axis]]
    if name == "gather":
        numbers, dims = params["dimension_numbers"], range(len(shapes[0]))
        batch = numbers.operand_batching_dims
        if axis in numbers.offset_dims:  # of a slice
            at = [i for i in dims if i not in (*numbers.collapsed_slice_dims, *batch)][numbers.offset_dims.index(axis)]
            return [at, None] if params["slice_sizes"][at] == shapes[0][at] else None
        at = axis - sum(i < axis for i in numbers.offset_dims)
        return [batch[numbers.start_indices_batching_dims.index(at)], at] if at in numbers.start_indices_batching_dims else None
    if name == "dot_general":
        contracted, batch = params["dimension_numbers"]
        if axis < len(batch[0]):
            return [batch[0][axis], batch[1][axis]]
        free = [(k, i) for k in (0, 1) for i in range(len(shapes[k])) if i not in (*contracted[k], *batch[k])]
        operand, at = free[axis - len(batch[0])]
        return [at if k == operand else None for k in (0, 1)]
    return None


def _summed(head: RowLoss, shared: list[Any], rows: list[Any]) -> list[Any]:
    """Returns the sums over all blocks. Their derivative is computed along with them."""
    place = next(i for i, v in enumerate(head.sums) if is_float(v))

    def loss(shared: list[Any], block: list[Any]) -> tuple[Any, list[Any]]:
        sums = head.run([*shared, *block])
        return sums.pop(place), sums

    blocks = [head.block(v, x) for v, x in zip(head.rows, rows, strict=True)]
    total, others = summed_over_parts("recompute", loss, has_aux=True)(shared, [blocks])
    return [*others[:place], total, *others[place:]]
