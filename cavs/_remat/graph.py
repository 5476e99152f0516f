"""A function and its derivative as equations: the forward, with all values that the backward reads, and the backward."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import jax
from jax.core import ShapedArray

from cavs._jaxpr.costs import bytes_of_var, flops_of, is_costly, is_heavy, may_repeat, price_of
from cavs._jaxpr.equations import is_float, needed, run_equations
from cavs._jaxpr.hold_back import barrier
from cavs._jaxpr.inline import inlined
from cavs._jaxpr.jaxprs import Atom, ClosedJaxpr, Env, Eqn, Var, is_var, opened
from cavs._jaxpr.late_zeros import run_late
from cavs._jaxpr.minimum_cut import compared, minimum_cut
from cavs._jaxpr.names import Names, behind, chosen, without_names
from cavs._jaxpr.reverse_only import refusal_in

_SMALL = 16
_NEVER = 1 << 20  # times the size of a value that is not to be kept
_TINY = 1 / 4096  # of a byte


@dataclass(eq=False)
class Graph:
    """One function, differentiated with respect to `diff`, in equations.

    Attributes:
        invars: of the function, flat.
        eqns: the forward, whose results are `outs` and everything that the backward reads.
        outs: of the function, flat. The cotangents of those in `float_outs` enter the backward.
        backward: the equations of the backward. Their inputs are `leaves` (`reads` says which forward value each is) and
            `cotangents`, their results `grads`, one for each index in `diff`.
        stored: inputs that cost memory if the backward reads them: the carry of a loop, which differs in each step.
        names: what the user asks for by name.
        named: the values of the forward that the user has named.
        refusal: why the derivative has no derivative in reverse mode, as of calls of `run`; else `None`.
    """

    invars: list[Var]
    eqns: list[Eqn]
    outs: list[Atom]
    consts: Env
    diff: list[int]
    float_outs: list[int]
    reads: dict[Var, Atom]
    backward: list[Eqn]
    backward_consts: Env
    cotangents: list[Var]
    grads: list[Atom]
    stored: list[Var]
    names: Names = ()
    named: dict[str, set[Var]] = field(default_factory=dict)
    refusal: str | None = None
    costly: list[int] = field(default_factory=list)
    plans: dict[tuple[Var, ...], "Kept"] = field(default_factory=dict)  # by what they keep
    choices: dict[Any, "Kept"] = field(default_factory=dict)  # by the prices

    def __post_init__(self) -> None:
        self.backward, _ = needed(self.backward, self.grads, set(self.cotangents) | set(self.reads) | set(self.backward_consts))
        self.costly = [i for i, e in enumerate(self.eqns) if is_costly(e)]

    @cached_property
    def stretches(self) -> list[list[Eqn]]:
        """The backward, cut after each product."""
        found: list[list[Eqn]] = [[]]
        for eqn in self.backward:
            found[-1].append(eqn)
            if is_heavy(eqn):
                found.append([])
        return [stretch for stretch in found if stretch]

    def needs(self) -> list[Var]:
        """Returns the forward values that the backward reads, each once."""
        read = {x for e in self.backward for x in e.invars if is_var(x)} | {x for x in self.grads if is_var(x)}
        atoms = [self.reads[v] for v in self.reads if v in read]
        return list(dict.fromkeys(x for x in atoms if is_var(x)))

    def choose(self, price: Callable[[int, float], float | None], fixed: Collection[Var] = ()) -> "Kept":
        """Chooses what to keep.

        Args:
            price: from the ordinal of a costly equation (its place in `costly`) and its FLOPs to the price in bytes of running
                it again; None: never.
            fixed: values that are kept in any case, if something needs them.
        """
        costly = ((k, self.eqns[i]) for k, i in enumerate(self.costly))
        prices = tuple(price(k, flops_of(e)) if may_repeat(e) else None for k, e in costly)
        key = prices, frozenset(fixed)
        if key not in self.choices:
            self.choices[key] = self._cut(dict(zip(self.costly, prices, strict=True)), fixed)
        return self.choices[key]

    def _cut(self, prices: dict[int, float | None], fixed: Collection[Var]) -> "Kept":
        """Chooses what to keep. `prices`: of the costly equations."""
        asked = set(fixed) | chosen(self.named, self.names, "keep") | chosen(self.named, self.names, "offload")
        never = chosen(self.named, self.names, "recompute")
        again = behind(self.eqns, never, is_costly)

        once: set[Var] = set()

        def price_at(i: int) -> float | None:
            if any(v in once for v in self.eqns[i].outvars):
                return None
            if i not in prices:
                return price_of(self.eqns[i])
            free = may_repeat(self.eqns[i]) and any(v in again for v in self.eqns[i].outvars)
            return 0.0 if free else prices[i]

        needs = self.needs()
        # Of equally small cuts, the one of the fewest values.
        size = lambda v: bytes_of_var(v) * (_NEVER if v in never else 1) + (0 if v in self.stored else _TINY)  # noqa: E731
        given = asked | (set(self.invars) - set(self.stored)) | set(self.consts)
        while True:
            keep, _ = minimum_cut(self.eqns, needs, price_at, asked, self.stored, size)
            have = {*keep, *given}
            if not (more := compared(self.eqns, needs, have) - once):
                break
            once |= more
        read = needed(self.eqns, needs, have)[1]
        return self.keeping([*keep, *(v for v in dict.fromkeys(read) if v in asked)])

    def plain(self) -> "Kept":
        """Returns what JAX keeps: everything that the backward reads."""
        free = (set(self.invars) - set(self.stored)) | set(self.consts)
        return self.keeping([v for v in self.needs() if v not in free])

    def keeping(self, keep: list[Var]) -> "Kept":
        """Returns the plan of this graph that keeps the values `keep`: always the same object."""
        if (same := self.plans.get(tuple(keep))) is not None:
            return same
        needs = self.needs()
        free = (set(self.invars) - set(self.stored)) | set(self.consts)
        again, used = needed(self.eqns, needs, set(keep) | free)
        read = dict.fromkeys([*(v for v in used if v in free), *(v for v in needs if v in free)])
        results = {v for e in again for v in e.outvars}
        repeated = [k for k, i in enumerate(self.costly) if not results.isdisjoint(self.eqns[i].outvars)]
        kept = self.plans[tuple(keep)] = Kept(self, keep, [v for v in read if v not in self.consts], again, repeated)
        return kept


@dataclass(eq=False)
class Kept:
    """The values that a graph keeps: `keep`, which cost memory, and `free`, inputs that exist anyway.

    Attributes:
        again: the equations that run again.
        repeated: the costly ones among them, as places in `graph.costly`.
        loops: if the graph is that of a loop, the loops of its derivative, see `loop_derivative`.
    """

    graph: Graph
    keep: list[Var]
    free: list[Var]
    again: list[Eqn]
    repeated: list[int]
    loops: dict[Any, Callable[..., list[Any]]] = field(default_factory=dict)

    def bytes(self) -> int:
        return sum(map(bytes_of_var, self.keep))

    def flops(self) -> float:
        """FLOPs of the costly equations that run again."""
        return sum(flops_of(self.graph.eqns[self.graph.costly[k]]) for k in self.repeated)

    def forward(self, args: Sequence[Any], late: bool) -> tuple[list[Any], list[Any]]:
        """Returns the outputs of the function and the values for the backward. `late`: see `run_late`."""
        graph = self.graph
        env = dict(zip(graph.invars, args, strict=True)) | graph.consts
        eqns, _ = needed(graph.eqns, [*graph.outs, *self.keep], set(env))
        (run_late if late else run_equations)(eqns, env)
        away = chosen(graph.named, graph.names, "offload")
        kept = [jax.device_put(env[v], jax.memory.Space.Host) if v in away else env[v] for v in self.keep]
        return [value(x, env) for x in graph.outs], [*(env[v] for v in self.free), *kept]

    def pull_back(self, kept: Sequence[Any], cotangents: Sequence[Any], late: bool) -> list[Any]:
        """Returns the cotangents of the inputs in `diff`.

        The backward runs from one costly equation to the next. Values that such a stretch reads and that were not kept are
        recomputed right before it. If `late`, a barrier ties them to the cotangent that the last costly equation computed.
        Without a barrier, XLA would recognise the forward's equations and keep their results.
        """
        graph = self.graph
        away = chosen(graph.named, graph.names, "offload")
        values = (*self.free, *self.keep)
        kept = [jax.device_put(x, jax.memory.Space.Device) if v in away else x for v, x in zip(values, kept, strict=True)]
        env: Env = dict(zip(values, kept, strict=True)) | graph.consts
        behind: Env = dict(zip(graph.cotangents, cotangents, strict=True)) | graph.backward_consts
        tie = [v for v, x in zip(graph.cotangents, cotangents, strict=True) if isinstance(x, jax.Array)]
        for i, stretch in enumerate(graph.stretches):
            reads = dict.fromkeys(x for e in stretch for x in e.invars if is_var(x) and x in graph.reads)
            self._recompute([graph.reads[v] for v in reads], env, behind, tie if late else [])
            behind |= {v: value(graph.reads[v], env) for v in reads}
            (run_late if late else run_equations)(stretch, behind)
            tie = [v for v in stretch[-1].outvars if is_float(v)] or tie
            if late:
                self._finish(stretch, graph.stretches[i + 1 :], behind)
        rest = [x for x in graph.grads if is_var(x) and x in graph.reads and x not in behind]
        self._recompute([graph.reads[v] for v in rest], env, behind, [])
        behind |= {v: value(graph.reads[v], env) for v in rest}
        return [value(x, behind) for x in graph.grads]

    def _finish(self, stretch: list[Eqn], later: list[list[Eqn]], behind: Env) -> None:
        """Ties gradients that a stretch has computed to the cotangents that later ones read: XLA may not delay them.

        If it did, the operands of these products would stay.
        """
        made = {v for e in stretch for v in e.outvars}
        done = [x for x in dict.fromkeys(self.graph.grads) if is_var(x) and x in made]
        read = {x for eqns in later for e in eqns for x in e.invars if is_var(x)}
        heavy = {v for e in self.graph.backward if is_heavy(e) for v in e.outvars}
        on = [v for v in behind if v in read and v in heavy and is_float(v)]
        if done and on:
            values = [*done, *(v for v in on if v not in done)]
            behind.update(zip(values, barrier([behind[v] for v in values]), strict=True))

    def _recompute(self, atoms: Sequence[Atom], env: Env, behind: Env, tie: Sequence[Var]) -> None:
        missing = [x for x in atoms if is_var(x) and x not in env]
        if not missing:
            return
        eqns, used = needed(self.graph.eqns, missing, set(env))
        used = list(dict.fromkeys(v for v in used if v not in self.graph.consts))
        local = dict(env)
        # XLA does not fuse across a barrier. Small values have none, because XLA may as well keep them.
        if tie and _SMALL * sum(map(bytes_of_var, missing)) >= sum(map(bytes_of_var, tie)):
            tied, late = barrier(([behind[v] for v in tie], [env[v] for v in used]))
            behind.update(zip(tie, tied, strict=True))
            local.update(zip(used, late, strict=True))
        (run_late if tie else run_equations)(eqns, local)
        env.update({v: local[v] for e in eqns for v in e.outvars})


def value(x: Atom, env: Env) -> Any:
    return env[x] if is_var(x) else x.val


def shape(x: Any) -> Any:
    """The type of a variable, an abstract value or an array; a shape stays one."""
    x = getattr(x, "aval", x)
    return x if isinstance(x, ShapedArray | jax.ShapeDtypeStruct) else jax.typeof(x)


def differentiated(
    function: Callable[..., Sequence[Any]], avals: Sequence[Any], diff: Sequence[int], stored: Sequence[int], names: Names = ()
) -> Graph:
    """Traces `function` (flat arrays to a flat list of arrays) and its derivative with respect to the arguments `diff`."""
    floats: list[int] = []

    def both(*args: Any) -> Any:
        def inner(*some: Any) -> Any:
            flat = list(args)
            for i, x in zip(diff, some, strict=True):
                flat[i] = x
            outs = list(function(*flat))
            floats[:] = [i for i, x in enumerate(outs) if is_float(x)]
            return [outs[i] for i in floats], outs

        _, vjp, outs = jax.vjp(inner, *(args[i] for i in diff), has_aux=True)
        return outs, vjp

    closed, (out_shapes, vjp) = jax.make_jaxpr(both, return_shape=True)(*avals)
    leaf_shapes, tree = jax.tree.flatten(vjp)

    def back(leaves: Any, cotangents: Any) -> Any:
        return list(jax.tree.unflatten(tree, leaves)(cotangents))

    invars, eqns, results, consts = _flat(closed)
    eqns, results, named = without_names(eqns, results)
    behind = jax.make_jaxpr(back)([shape(x) for x in leaf_shapes], [shape(out_shapes[i]) for i in floats])
    back_in, back_eqns, grads, back_consts = _flat(behind)
    n, m = len(out_shapes), len(leaf_shapes)
    return Graph(
        invars, eqns, results[:n], consts, list(diff), list(floats), dict(zip(back_in[:m], results[n:], strict=True)),
        back_eqns, back_consts, back_in[m:], grads, [invars[i] for i in stored], names, named,
        refusal_in(opened(cast(ClosedJaxpr, closed))[0]) or refusal_in(opened(cast(ClosedJaxpr, behind))[0]),
    )  # fmt: skip


def _flat(closed: Any) -> tuple[list[Var], list[Eqn], list[Atom], Env]:
    jaxpr, values = opened(closed)
    eqns: list[Eqn] = []
    outs = inlined(jaxpr, {}, eqns)
    return list(jaxpr.invars), eqns, outs, dict(zip(jaxpr.constvars, values, strict=True))
