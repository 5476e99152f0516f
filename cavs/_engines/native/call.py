"""Engine `native`: one call of the library that runs levels."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cavs._engines.engine import Batch
from cavs._engines.native.kinds import NO_KIND, Lowered, Name, lowered, static_arrays
from cavs._engines.native.program import KindProgram, Written, encoded
from cavs._engines.native.values import Shift
from cavs._engines.scan.task import Kind, empty_cuts
from cavs._function.domains import EDGE, ROW
from cavs._function.split import Split
from cavs._jaxpr.jaxprs import Arrays, Var
from cavs._schedule.shape import slots_of
from cavs._stages.tensors import Rows
from cavs.kernels import NATIVE_LEVELS, native_call

# Arrays of the schedule, in the order of `Header` in kernels/_cpu/program.h. Those that are missing follow from others.
_FIELDS = (
    "num_rounds round_end task_row task_start task_size task_edge task_edges task_level inner_count edge_child first_edge "
    "num_children leaf_count leaf_row"
).split()


class NativeCall:
    """One call of the library: its tensors by name, and its program.

    `eager`: the number of a kind whose eager part runs instead of levels: its vertices are rows as if they were leaves.
    """

    def __init__(self, batch: Batch, backward: bool, eager: int | None = None):
        self.batch, self.backward, self.eager = batch, backward, eager
        self.rows = dict(enumerate(batch.rows))
        if eager is not None:
            self.rows = {len(batch.kinds) + eager: batch.rows[eager].as_leaves}
        self.inputs: dict[Name, jax.Array | Callable[[], jax.Array]] = {}
        self._results: dict[Name, jax.ShapeDtypeStruct] = {}
        self._kinds: dict[int, Lowered | None] = {}

    def updated(self, label: str, number: int, x: jax.Array) -> None:
        """Adds a tensor of states or of their cotangents, which the call updates in place."""
        self.inputs[(label, NO_KIND, number)] = x
        self.created(label, NO_KIND, number, x)

    def created(self, label: str, kind: int, number: int, like: jax.ShapeDtypeStruct | jax.Array) -> None:
        """Adds a result, which the call fills; if it is given as well, in place."""
        self._results[(label, kind, number)] = jax.ShapeDtypeStruct(like.shape, like.dtype)

    def kind(self, lowered_kind: Lowered | None, k: int, part: Split, statics: Arrays, eager: Arrays) -> None:
        """Adds the program of kind `k` (`None` without vertices), and the static values and eager rows that it reads."""
        self._kinds[k] = lowered_kind
        rows = self.rows[k]
        self.inputs[("num_children", k, 0)] = lambda: jnp.asarray(rows.inner(rows.num_children))
        self.inputs |= {("crossing", k, c): x for c, x in enumerate(eager[: len(part.recurrent.cross)])}
        if lowered_kind is not None:
            self.inputs |= static_arrays(lowered_kind, part, k, statics)

    def forward_of(self, k: int, part: Split, statics: Arrays, eager: Arrays, save: bool) -> None:
        """Adds the forward of kind `k`, which creates what `saved_of` returns."""
        rows = self.rows[k]
        self.kind(lowered(part, k, True, save, (), ()) if rows.size else None, k, part, statics, eager)
        for n, v in enumerate(part.forward.keep if save else ()):
            self.created("kept", k, n, _shape(rows, v.aval, part.joint.domain.get(v) == EDGE, slack=True))
        for n, (x, domain) in enumerate(zip(part.recurrent.extra, part.extra_domain, strict=True)):
            self.created("extra", k, n, _shape(rows, x.aval, domain == EDGE, slack=False))

    @staticmethod
    def saved_of(out: dict[Name, jax.Array], k: int, part: Split, save: bool) -> tuple[Arrays, Arrays]:
        """Returns what the forward of kind `k` keeps, and what the lazy part reads."""
        kept = [out["kept", k, n] for n in range(len(part.forward.keep) if save else 0)]
        return kept, [out["extra", k, n] for n in range(len(part.recurrent.extra))]

    def backward_of(self, kind: Kind, statics: Arrays, eager: Arrays, kept: Arrays, extras: Arrays) -> None:
        """Adds the backward of a kind. It writes its cut cotangents to new tensors, or over what the forward kept."""
        k, part, rows = kind.number, kind.part, kind.rows
        program = lowered(part, k, False, True, tuple(kind.reused.items()), tuple(kind.own.items())) if rows.size else None
        self.kind(program, k, part, statics, eager)
        self.inputs |= {("kept", k, n): x for n, x in enumerate(kept)} | {("extra", k, n): x for n, x in enumerate(extras)}
        for i in part.reverse.extra_cts:
            like = _shape(rows, part.recurrent.extra[i].aval, part.extra_domain[i] == EDGE, True)
            zero = functools.partial(jnp.zeros, like.shape, like.dtype)
            self.inputs["extra_cotangent", k, i] = kind.extra_cts[i] if i in kind.extra_cts else zero
        shapes = jax.eval_shape(lambda: empty_cuts(kind, self.batch.zeros))
        for v, x in zip(kind.stored, shapes, strict=True):
            self.created(*_name_of_cut(kind, v), x)

    @staticmethod
    def cuts_of(out: dict[Name, jax.Array], kind: Kind) -> Arrays:
        """Returns the cut cotangents of a kind, in the order of `Kind.stored`."""
        return [out[_name_of_cut(kind, v)] for v in kind.stored]

    def run(self) -> dict[Name, jax.Array]:
        """Runs all levels. Returns the results by name."""
        if not self._results:
            return {}
        used: dict[Name, None] = {}
        self._words(lambda name: used.setdefault(name, None) or 0)
        names = [name for name in self.inputs if name in self._results or name in used]
        results = list(self._results)
        place = {name: i for i, name in enumerate(names)} | {name: len(names) + i for i, name in enumerate(results)}
        words = np.array(self._words(lambda name: place[name]), np.int32)
        arrays = [x() if callable(x) else x for x in (self.inputs[name] for name in names)]
        arrays = [x.astype(jnp.int32) if x.dtype == jnp.bool_ else x for x in arrays]  # as the library has booleans
        aliases = {1 + i: results.index(name) for i, name in enumerate(names) if name in self._results}
        shapes = [jax.ShapeDtypeStruct(x.shape, jnp.int32 if x.dtype == jnp.bool_ else x.dtype) for x in self._results.values()]
        out = native_call(NATIVE_LEVELS, shapes, [jnp.asarray(self.batch.sched.data), *arrays], words, aliases)
        return {name: x.astype(like.dtype) for (name, like), x in zip(self._results.items(), out, strict=True)}

    def _words(self, number: Callable[[Name], int]) -> list[int]:
        shape = self.batch.sched.shape
        slots = slots_of(shape)
        places = {name: slots[name][0] if name in slots else -1 for name in _FIELDS}
        inner = len(shape.kinds) if self.eager is None else 0
        leaves = [k for k in self._kinds if k >= len(shape.kinds)]
        if self.eager is not None:
            places |= {"leaf_count": slots["inner_count"][0] + self.eager, "leaf_row": -1}
        states = [name for name in self._results if name[0] == "state" and name not in self.inputs]
        words = [int(self.backward), inner, len(shape.classes), shape.arity, int(shape.forest), *places.values()]
        words += [shape.tasks, shape.rows, len(leaves), len(states), *map(number, states)]
        at = edge_at = 0
        for k in [*range(inner), *leaves]:
            lowered_kind, rows, leaf = self._kinds.get(k), self.rows[k], k >= inner
            sizes = [rows.size, rows.edges, -1 if leaf else at, 0 if leaf else edge_at, rows.pad, rows.edge_pad]
            # Without vertices, the call fills the results of the kind with zeros.
            written = [Written(name, ROW, Shift.NONE, False) for name in self._results if name[1] == k and name[0] != "state"]
            words += encoded(lowered_kind.program if lowered_kind else KindProgram([], {}, [], written), sizes, number)
            at, edge_at = at + rows.size, edge_at + rows.edges
        return words


def _name_of_cut(kind: Kind, v: Var) -> Name:
    """Returns where a cut cotangent is stored: over what the forward kept, or in a new tensor."""
    return ("kept", kind.number, kind.reused[v]) if v in kind.reused else ("cut", kind.number, kind.cuts.values.index(v))


def _shape(rows: Rows, aval: Any, edge: bool, slack: bool) -> jax.ShapeDtypeStruct:
    n, pad = (rows.edges, rows.edge_pad) if edge else (rows.size, rows.pad)
    return jax.ShapeDtypeStruct((n + 2 * pad * slack, *aval.shape), aval.dtype)
