"""Engine `native`: equations of F for one vertex become operations of its library on the rows of a tile."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cavs._engines.native.operations import CODE, MOVES, REDUCTIONS, elementwise, letter, moved, pieces, reduction
from cavs._engines.native.values import NOT_GATHERED, Base, Gathered, Op, Opcode, Parts, Place, Shift, Value, View
from cavs._function.children import REDUCTIONS as OF_CHILDREN, enter_p, spread_p
from cavs._function.domains import EDGE, ROW, STATIC, Domain, Domains, domain_of
from cavs._jaxpr.jaxprs import Atom, Eqn, Var, is_var
from cavs.kernels import Unfit

_VIEWS = ("stop_gradient", "copy_p", "optimization_barrier", enter_p.name)


class Lowering:
    """Collects the operations of one kind and direction."""

    def __init__(self, domain: Domains, constant: Callable[[np.ndarray], Any]):
        self.ops: list[Op] = []  # the operations
        self.values: dict[Var, Value] = {}  # where the values of variables lie
        self.domain = domain
        self.constant = constant  # called with a NumPy array, which becomes a static tensor; returns its name

    # Inputs.

    def static(self, v: Var, tensor: Any) -> None:
        """Declares that `v` is a static tensor of the call."""
        letter(v)
        self.values[v] = View(Base(_size(v), STATIC, Place.STATIC, tensor))

    def rows(self, v: Var, tensor: Any, shift: Shift, domain: Domain = ROW) -> None:
        """Declares that `v` lies in the rows of a tensor of the call."""
        letter(v)
        self.values[v] = View(Base(_size(v), domain, Place.ROWS, tensor, shift))

    def gathered(self, v: Var, tensor: Any, child: int) -> None:
        """Declares that `v` is a child's row of a tensor of states; `child` is -1 for the child of an edge."""
        letter(v)
        self.values[v] = Gathered(tensor, child, _size(v))

    # Outputs.

    def stored(self, x: Atom, tensor: Any, shift: Shift, domain: Domain, last: bool = False) -> None:
        """Stores a value in the rows of a tensor. With `last` it overwrites rows that others read, after all of these."""
        letter(x)
        n, view = _size(x), self.view(x, domain)
        base = view.base
        whole = base.place == Place.ARENA and base.inside is None and base.n == n and view.step == 1 and base.domain == domain
        if whole and not last:
            base.place, base.tensor, base.shift = Place.ROWS, tensor, shift
            return
        to = View(Base(n, domain, Place.ROWS, tensor, shift))
        self.ops.append(Op(Opcode.ELEMENTWISE, domain, n, to, CODE["copy"], [view], last=last))

    def scattered(self, x: Atom, tensor: Any, child: int, domain: Domain, add: bool) -> None:
        """Adds a value to the rows of children in a tensor, or overwrites them."""
        n, view = _size(x), self.view(x, domain)
        code = CODE["add" if add else "copy"]
        self.ops.append(Op(Opcode.SCATTER, domain, n, None, code, [view], tensor=tensor, child=child, last=True))

    # Values.

    def view(self, x: Atom, domain: Domain) -> View:
        """Returns the place of a variable or literal. A child's row is gathered first, and parts become one."""
        if not is_var(x):
            return self._literal(x)
        value = self.values[x]
        view = self._made(value, self.domain.get(x, domain) or domain)
        if view is not value:
            self.values[x] = view
        return view

    def _literal(self, x: Any) -> View:
        kind, value = letter(x), np.asarray(x.val)
        stored = value.astype({"f": np.float32, "i": np.int32, "b": np.int32}[kind])
        if stored.size == 1:
            return View(Base(1, STATIC, Place.LITERAL, int(stored.reshape(()).view(np.int32))), 0, 0)
        return View(Base(stored.size, STATIC, Place.STATIC, self.constant(stored)))

    def _made(self, value: Value, domain: Domain) -> View:
        match value:
            case View():
                return value
            case Gathered():
                to = View(Base(value.n, domain))
                self.ops.append(Op(Opcode.GATHER, domain, value.n, to, tensor=value.tensor, child=value.child))
                return to
            case Parts():
                return self._joined(value, domain)

    def _joined(self, parts: Parts, domain: Domain) -> View:
        """Puts values side by side: if possible they are computed there, and otherwise copied."""
        base, at = Base(sum(n for _, n in parts.of), domain), 0
        op = Op(Opcode.MOVE, domain, base.n, View(base))
        for value, n in parts.of:
            if isinstance(value, Gathered):
                self.ops.append(Op(Opcode.GATHER, domain, n, View(base, at), tensor=value.tensor, child=value.child))
            elif self._free(value, n, domain):
                assert isinstance(value, View)
                value.base.inside = base, at
            else:
                op.runs.append((self._made(value, domain), at, n))
            at += n
        if op.runs:
            self.ops.append(op)
        return View(base)

    @staticmethod
    def _free(value: Value, n: int, domain: Domain) -> bool:
        """Returns whether a value fills a base that may be placed anywhere."""
        if not isinstance(value, View) or value.step != 1 or value.offset:
            return False
        base = value.base
        return base.place == Place.ARENA and base.inside is None and base.n == n and base.domain == domain

    # Equations.

    def equation(self, eqn: Eqn) -> None:
        """Adds the operations of an equation, of which at least one operand is not static.

        Raises `Unfit` if the library cannot compute it.
        """
        name, domain = eqn.primitive.name, self.domain[eqn.outvars[0]]
        operation = elementwise(eqn)
        if name in _VIEWS or operation == "view":
            for v, x in zip(eqn.outvars, eqn.invars, strict=True):
                self.values[v] = self.values[x] if is_var(x) else self.view(x, domain)
        elif operation is not None:
            self._elementwise(eqn, operation, domain)
        elif name in MOVES:
            self._move(eqn, domain)
        elif name == "dot_general":
            self._product(eqn, domain)
        elif eqn.primitive is spread_p:
            self._spread(eqn)
        elif eqn.primitive in OF_CHILDREN:
            x, n = eqn.invars[0], _size(eqn.outvars[0])
            view = self._in_domain(self.view(x, EDGE), n, EDGE)
            self.ops.append(Op(Opcode.CHILDREN, ROW, n, self._new(eqn.outvars[0], ROW), reduction(eqn), [view]))
        elif name in REDUCTIONS:
            self._reduce(eqn, domain)
        else:
            raise Unfit(f"the library has no {name}")

    def _new(self, v: Var, domain: Domain) -> View:
        letter(v)
        self.values[v] = View(Base(_size(v), domain))
        return self.values[v]  # type: ignore[return-value]

    def _elementwise(self, eqn: Eqn, operation: str, domain: Domain) -> None:
        n, views = _size(eqn.outvars[0]), [self.view(x, domain) for x in eqn.invars]
        scalars = [n > 1 and _size(x) == 1 for x in eqn.invars]  # beside a result that is none
        views = [View(v.base, v.offset, 0) if is_scalar else v for v, is_scalar in zip(views, scalars, strict=True)]
        imm = eqn.params["y"] if operation == "integer_pow" else 0
        if any(_size(x) not in (1, n) for x in eqn.invars):  # the library would read beyond the operand
            raise Unfit(f"{eqn.primitive.name} of operands of {[x.aval.shape for x in eqn.invars]}")
        self.ops.append(Op(Opcode.ELEMENTWISE, domain, n, self._new(eqn.outvars[0], domain), CODE[operation], views, imm))

    def _move(self, eqn: Eqn, domain: Domain) -> None:
        """Moves elements: by other views of the same memory if possible, by copies otherwise."""
        axis = eqn.params.get("dimension", eqn.params.get("axis"))
        if eqn.primitive.name in ("concatenate", "stack") and math.prod(eqn.invars[0].aval.shape[:axis]) == 1:
            parts = [(self.values[x] if is_var(x) else self.view(x, domain), _size(x)) for x in eqn.invars]
            self.values[eqn.outvars[0]] = Parts(parts)
            letter(eqn.outvars[0])
            return
        for v, at in zip(eqn.outvars, moved(eqn), strict=True):
            letter(v)
            self.values[v] = self._picked(eqn.invars, at, domain, steps=(0, 1))

    def _picked(self, operands: Sequence[Atom], at: np.ndarray, domain: Domain, steps: Sequence[int] = ()) -> View:
        """Returns the elements with numbers `at` of all elements of the operands.

        They are a view of one operand, if its step is one of `steps`, and otherwise copies.
        """
        runs = pieces([self.view(x, domain) for x in operands], [_size(x) for x in operands], at)
        if len(runs) == 1 and runs[0][0].step in steps:
            return runs[0][0]
        to = View(Base(len(at), domain))
        self.ops.append(Op(Opcode.MOVE, domain, to.base.n, to, runs=runs))
        return to

    def _in_domain(self, view: View, n: int, domain: Domain) -> View:
        """Copies a value, if necessary, to rows with one element after another: only elementwise operations read others."""
        if view.step == 1 and view.base.domain == domain:
            return view
        to = View(Base(n, domain))
        self.ops.append(Op(Opcode.ELEMENTWISE, domain, n, to, CODE["copy"], [view]))
        return to

    def _spread(self, eqn: Eqn) -> None:
        x, v = eqn.invars[0], eqn.outvars[0]
        view, n = self.view(x, ROW), _size(v)
        if view.base.domain == STATIC:
            self.values[v] = view
            return
        view = self._in_domain(view, n, ROW)
        self.ops.append(Op(Opcode.SPREAD, ROW, n, self._new(v, EDGE), sources=[view]))

    def _reduce(self, eqn: Eqn, domain: Domain) -> None:
        x, axes = eqn.invars[0], tuple(eqn.params["axes"])
        shape, n = x.aval.shape, _size(x)
        kept_axes = [i for i in range(len(shape)) if i not in axes]
        order = [*kept_axes, *axes]
        view = self.view(x, domain)
        inner, outer = 1, [shape[i] for i in kept_axes]
        if kept_axes and axes and max(axes) < min(kept_axes):  # these are contiguous: no need to move them
            inner, outer = math.prod(outer), []
        elif order != list(range(len(shape))):
            view = self._picked([x], np.arange(n).reshape(shape).transpose(order).reshape(-1), domain)
        view = self._in_domain(view, n, domain)
        sizes = [math.prod(outer), math.prod(shape[i] for i in axes), inner]
        if 0 in sizes:
            raise Unfit("a reduction of nothing")
        to = self._new(eqn.outvars[0], domain)
        self.ops.append(Op(Opcode.REDUCE, domain, to.base.n, to, reduction(eqn), [view], sizes=sizes))

    def _product(self, eqn: Eqn, domain: Domain) -> None:
        if any(letter(x) != "f" for x in eqn.invars):
            raise Unfit("a product of integers")
        (lc, rc), (lb, _) = eqn.params["dimension_numbers"]
        x, w = eqn.invars
        if domain_of(x, self.domain) == STATIC and len(w.aval.shape) == 1:  # W @ x is x @ W^T
            (x, w), (lc, rc) = (w, x), (rc, lc)
        shape = w.aval.shape
        last, ends = len(x.aval.shape) - 1, (0, len(shape) - 1)
        static = is_var(w) and domain_of(w, self.domain) == STATIC and domain_of(x, self.domain) != STATIC
        if static and not lb and tuple(lc) == (last,) and len(shape) > 1 and rc[0] in ends:
            self._times_weight(eqn, x, w, rc[0] != 0, domain)
        else:
            self._dot(eqn, domain)

    def _times_weight(self, eqn: Eqn, x: Atom, w: Atom, turned: bool, domain: Domain) -> None:
        k = x.aval.shape[-1]
        n, m = w.aval.size // k if k else 0, _size(x) // k if k else 0
        if not k * n * m:
            raise Unfit("a product without elements")
        value = self.values[x] if is_var(x) else self.view(x, domain)
        parts = value.of if isinstance(value, Parts) and all(size == k for _, size in value.of) else None
        parts = parts or ([(value, k)] if isinstance(value, Gathered) and m == 1 else None)
        sources: list[View] = []
        gathered: list[tuple[int, Any]] = []
        if parts is None:
            view = self._in_domain(self.view(x, domain), _size(x), domain)
            parts = [(View(view.base, view.offset + j * k), k) for j in range(m)]
        for part, _ in parts:
            if isinstance(part, Gathered):
                gathered.append((part.child, part.tensor))
                continue
            view = self._made(part, domain)
            sources.append(view if view.base.domain == STATIC and view.step else self._in_domain(view, k, domain))
            gathered.append((NOT_GATHERED, None))
        tensor = self.view(w, domain).base.tensor
        to = self._new(eqn.outvars[0], domain)
        self.ops.append(
            Op(Opcode.PRODUCT, domain, m * n, to, sources=sources, gathered=gathered, weight=(tensor, turned, k, n))
        )

    def _dot(self, eqn: Eqn, domain: Domain) -> None:
        """Adds a product of two values of rows, row by row: no operand is a weight."""
        (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
        views, free = [], []
        for x, batch, contracted in zip(eqn.invars, (lb, rb), (lc, rc), strict=True):
            shape = x.aval.shape
            free_axes = [i for i in range(len(shape)) if i not in (*batch, *contracted)]
            at = np.arange(_size(x)).reshape(shape).transpose([*batch, *free_axes, *contracted]).reshape(-1)
            views.append(self._picked([x], at, domain, steps=(1,)))
            free.append(math.prod(shape[i] for i in free_axes))
        batch = math.prod(eqn.invars[0].aval.shape[i] for i in lb)
        k = math.prod(eqn.invars[0].aval.shape[i] for i in lc)
        m, n = free
        to = self._new(eqn.outvars[0], domain)
        sizes = [batch, m, n, k, m * k, k, 1, n * k, k, 1]
        self.ops.append(Op(Opcode.DOT, domain, to.base.n, to, sources=views, sizes=sizes))


def _size(x: Atom) -> int:
    return int(np.prod(x.aval.shape, dtype=np.int64))
