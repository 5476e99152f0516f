"""A function with its derivative, and the values that the forward keeps for the backward."""

import hashlib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
from jax.extend import core as jex

from cavs._jaxpr.costs import bytes_of_var, flops_of, is_costly, is_heavy, may_repeat, price_of
from cavs._jaxpr.custom_rules import in_forward_mode, reverse_differentiable
from cavs._jaxpr.derivative import Derivative, cheapest, derivative
from cavs._jaxpr.equations import is_float, run_equations, values
from cavs._jaxpr.hold_back import barrier
from cavs._jaxpr.jaxprs import Atom, Env, Eqn, Var, bodies_in, is_var
from cavs._jaxpr.late_zeros import run_late
from cavs._jaxpr.memo import memoized
from cavs._jaxpr.names import Names, chosen
from cavs._remat.forms import Form, bits_of, compared_by_result, kept_bytes, on_host

Flat = Callable[..., list[Any]]  # a function of flat arrays
Keep = Callable[[list[int]], "Kept"]  # from the inputs that are differentiated to what is kept

_SMALL = 16
_TINY = 1 / 4096  # of a byte
_FREE = 1e-9  # bytes for each FLOP: negligible, but among equal cuts the one that recomputes less wins
_SPREAD = 0.1  # by how much prices of equal products differ


@dataclass(frozen=True, eq=False)
class Graph(Derivative):
    """One function, differentiated with respect to the arguments `diff`."""

    diff: list[int]  # the arguments that are differentiated
    stored: list[Var]  # arguments that cost memory if the backward reads them: the carry of a loop, which differs in each step
    names: Names  # what the user asks for by name

    @classmethod
    def of(
        cls, function: Flat, avals: Sequence[Any], diff: Sequence[int], stored: Sequence[int], names: Names, refusal: str | None
    ) -> "Graph":
        """Traces a flat function and its derivative. `stored` are places of arguments, `refusal` as in `Derivative`."""
        derived = derivative(function, avals, diff)
        traced: dict[str, Any] = vars(derived) | {"forward": compared_by_result(derived.forward)}
        traced["refusal"] = derived.refusal or refusal
        return cls(**traced, diff=list(diff), stored=[derived.invars[i] for i in stored], names=names)

    @cached_property
    def costly(self) -> list[int]:
        """The equations of the forward that do not run again unless a budget asks for it."""
        return [i for i, e in enumerate(self.forward) if is_costly(e)]

    @cached_property
    def free(self) -> set[Var]:
        """What the backward can read without keeping it."""
        return {*self.invars, *self.consts}.difference(self.stored)

    @cached_property
    def mark(self) -> str:
        """A hash of the function."""
        return mark(self.forward)

    @cached_property
    def _makers(self) -> dict[Var, int]:
        return {v: i for i, e in enumerate(self.forward) for v in e.outvars}

    def needed(self, wanted: Iterable[Atom], have: Collection[Var]) -> tuple[list[Eqn], list[Var]]:
        """Returns the equations of the forward that compute `wanted` from the values `have`, and which of these they read."""
        todo, positions, used = list(filter(is_var, wanted)), set[int](), dict[Var, None]()
        while todo:
            v = todo.pop()
            if v in have:
                used[v] = None
            elif (i := self._makers.get(v)) is not None and i not in positions:
                positions.add(i)
                todo += filter(is_var, self.forward[i].invars)
        return [self.forward[i] for i in sorted(positions)], list(used)

    @cached_property
    def stretches(self) -> list[list[Eqn]]:
        """The backward, cut after each product."""
        stretches: list[list[Eqn]] = [[]]
        for eqn in self.backward:
            stretches[-1].append(eqn)
            if is_heavy(eqn):
                stretches.append([])
        return [stretch for stretch in stretches if stretch]

    @memoized
    def choose(self, price: float, rank: int = 0, fixed: frozenset[Var] = frozenset()) -> "Kept":
        """Chooses what to keep.

        `price`: bytes for each FLOP of costly equations that run again; `math.inf`: none does. `rank`: of several graphs. Among
        equal products, those of the first ones, and the first ones in a graph, cost less. `fixed`: values that are kept in any
        case, if something needs them.
        """
        forward, stored = self.forward, self.stored
        ranks = {i: rank + k / len(self.costly) for k, i in enumerate(self.costly)}

        def price_at(i: int) -> float | None:
            if i not in ranks:
                return price_of(forward[i])
            cost = max(price, _FREE) * flops_of(forward[i]) * (1 + _SPREAD * ranks[i])
            return cost if cost < math.inf and may_repeat(forward[i]) else None

        def size(v: Var) -> float:  # of equal cuts, that of the fewest values
            return kept_bytes(v) + (0 if v in stored else _TINY)

        by_name = {"names": self.names, "named": self.named}
        keep = cheapest(
            forward, self.needs, price_at, is_costly, free=self.free, stored=stored, preferred=fixed, size=size, **by_name
        )
        return self.keeping(tuple(keep))

    def plain(self) -> "Kept":
        """Returns what JAX keeps: everything that the backward reads."""
        return self.keeping(tuple(v for v in self.needs if v not in self.free), in_bits=False)

    @memoized
    def keeping(self, keep: tuple[Var, ...], in_bits: bool = True, host: frozenset[Var] = frozenset()) -> "Kept":
        """Returns the plan that keeps the values `keep`, masks as bits, some on the host: always the same object."""
        again, used = self.needed(self.needs, {*keep, *self.free})
        read = dict.fromkeys(v for v in used if v in self.free and v not in self.consts)
        results = {v for e in again for v in e.outvars}
        repeated = [k for k, i in enumerate(self.costly) if not results.isdisjoint(self.forward[i].outvars)]
        forms = {v: form for v in keep if in_bits and (form := bits_of(v)) is not None}
        host = (host | chosen(self.named, self.names, "offload")).intersection(keep)
        forms |= {v: on_host(v, forms.get(v)) for v in keep if v in host}
        return Kept(self, keep, in_bits, host, forms, list(read), again, repeated)

    def saved(self, record: dict[str, Any] | None) -> "Kept":
        """Returns what `Kept.as_json` wrote; what JAX keeps if that was another function, or one of other shapes."""
        if record is None or record["graph"] != self.mark:
            return self.plain()
        keep, host = (
            [self.invars[j] if i < 0 else self.forward[i].outvars[j] for i, j in record.get(k, ())] for k in ("keep", "host")
        )
        return self.keeping(tuple(keep), record["in_bits"], frozenset(host))


class BackwardStep(NamedTuple):
    """A part of the backward: what it needs of the forward, and its own equations, of which the last one is a product."""

    missing: list[Var]  # the values of the forward that are not there
    again: list[Eqn]  # the equations of the forward that compute them
    used: list[Var]  # what these read, except constants
    stretch: list[Eqn]


@dataclass(frozen=True, eq=False)
class Kept:
    """The values that a graph keeps for its backward."""

    graph: Graph
    keep: tuple[Var, ...]  # the values that cost memory
    in_bits: bool  # whether masks are kept in bits
    host: frozenset[Var]  # the values that are kept in the memory of the host
    forms: dict[Var, Form]  # how masks, and values on the host, are kept
    free: list[Var]  # inputs that the backward reads, which exist anyway
    again: list[Eqn]  # the equations that run again
    repeated: list[int]  # the costly ones among them, as places in `graph.costly`

    def bytes(self) -> int:
        """Returns the bytes of the kept values on the device."""
        return sum(bytes_of_var(self.as_kept(v)) for v in self.keep)

    @property
    def variables(self) -> list[Var]:
        """The values from which the backward starts: `free`, and `keep` in their forms."""
        return [*self.free, *map(self.as_kept, self.keep)]

    def as_kept(self, v: Var) -> Var:
        """Returns the variable of a kept value, or that of its form."""
        return self.forms[v].var if v in self.forms else v

    def to_run(self) -> list[Eqn]:
        """Returns the equations of the forward."""
        graph = self.graph
        eqns, _ = graph.needed([*graph.outs, *self.keep], {*graph.invars, *graph.consts})
        defined = [graph.invars, *(e.outvars for e in eqns)]
        packs = [[e for v in variables if v in self.forms for e in self.forms[v].pack] for variables in defined]
        return [*packs[0], *(x for e, pack in zip(eqns, packs[1:], strict=True) for x in (e, *pack))]

    def flops(self) -> float:
        """Returns the FLOPs of the costly equations that run again."""
        return sum(flops_of(self.graph.forward[self.graph.costly[k]]) for k in self.repeated)

    def as_json(self) -> dict[str, Any]:
        """Returns the equation and the number of each kept value (of inputs -1 and their number), and a mark of the graph."""
        places = {v: (-1, j) for j, v in enumerate(self.graph.invars)}
        places |= {v: (i, j) for i, e in enumerate(self.graph.forward) for j, v in enumerate(e.outvars)}
        return {
            "graph": self.graph.mark,
            "keep": [places[v] for v in self.keep],
            "host": [places[v] for v in self.keep if v in self.host],
            "in_bits": self.in_bits,
        }

    def run_forward(self, args: Sequence[Any], late: bool) -> tuple[list[Any], list[Any]]:
        """Returns the results of the function and the values for the backward. `late`: see `run_late`."""
        graph = self.graph
        env = dict(zip(graph.invars, args, strict=True)) | graph.consts
        hosts, copies = set(map(self.as_kept, self.host)), [list[Var](), list[Var]()]

        def wait(eqn: Eqn) -> None:
            """Lets a product wait for the copies to the host that began before the last one: their memory is free then."""
            copies[1] += [v for v in eqn.outvars if v in hosts]
            if is_heavy(eqn):
                done, copies[:] = copies[0], [copies[1], []]
                x = next((x for x in eqn.invars if is_var(x) and x not in graph.free), None)
                if done and x is not None:
                    env.update(zip([x, *done], barrier([env[x], *(env[v] for v in done)]), strict=True))

        if late:
            run_late(self.to_run(), env, wait)
        else:
            run_equations(self.to_run(), env)
        return values(graph.outs, env), values(self.variables, env)

    @cached_property
    def steps(self) -> list[BackwardStep]:
        """The backward, from one product to the next. A copy from the host runs beside the product before its first use."""
        stretches, steps = [*self.graph.stretches, list[Eqn](), list[Eqn]()], list[BackwardStep]()
        have = {*self.variables, *self.graph.consts, *self.graph.seeds}
        for stretch, following in itertools.pairwise(stretches):
            results = {v for e in stretch for v in e.outvars}
            read = [x for e in stretch for x in e.invars] if stretch else self.graph.grads
            _, early = self.graph.needed((x for e in following for x in e.invars), {*have, *self.forms})
            wanted = filter(is_var, [*(v for v in early if v in self.host), *read])
            missing = [x for x in dict.fromkeys(wanted) if x not in have and x not in results]
            eqns, sources = self.graph.needed(missing, {*have, *self.forms})
            forms = [self.forms[v] for v in sources if v not in have]
            again = [*(e for form in forms for e in form.unpack), *eqns]
            used = dict.fromkeys([*(v for v in sources if v in have), *(form.var for form in forms)])
            steps.append(BackwardStep(missing, again, [v for v in used if v not in self.graph.consts], stretch))
            have |= results.union(*(e.outvars for e in again))
        return steps

    def pull_back(self, saved: Sequence[Any], cotangents: Sequence[Any], late: bool) -> list[Any]:
        """Returns the cotangents of the inputs in `diff`.

        Values that were not kept are computed again right before the first equations that read them. If `late`, a barrier ties
        them to the cotangent that the last product computed. Without it, XLA would recognise the forward's equations and keep
        their results.
        """
        graph, run = self.graph, run_late if late else run_equations
        env: Env = graph.consts | dict(zip((*self.variables, *graph.seeds), (*saved, *cotangents), strict=True))
        tie = [v for v, x in zip(graph.seeds, cotangents, strict=True) if isinstance(x, jax.Array)]
        for i, step in enumerate(self.steps):
            local = dict(env)
            # XLA does not fuse across a barrier. Small values have none, because XLA may as well keep them.
            small = _SMALL * sum(map(bytes_of_var, step.missing)) < sum(map(bytes_of_var, tie))
            if late and step.missing and step.stretch and tie and not small:
                tied, held = barrier(([env[v] for v in tie], [env[v] for v in step.used]))
                env.update(zip(tie, tied, strict=True))
                local.update(zip(step.used, held, strict=True))
            run(step.again, local)
            env.update({v: local[v] for e in step.again for v in e.outvars})
            run(step.stretch, env)
            if late and step.stretch:
                tie = [v for v in step.stretch[-1].outvars if is_float(v)] or tie
                self._finish({v for e in step.stretch for v in e.outvars}, graph.stretches[i + 1 :], env)
        return values(graph.grads, env)

    def _finish(self, computed: set[Var], later: list[list[Eqn]], env: Env) -> None:
        """Ties gradients that a stretch has computed to the cotangents that later ones read: XLA may not delay them.

        If it did, the operands of these products would stay.
        """
        grads = [x for x in dict.fromkeys(filter(is_var, self.graph.grads)) if x in computed]
        read = {x for eqns in later for e in eqns for x in e.invars if is_var(x)}
        heavy = {v for e in self.graph.backward if is_heavy(e) for v in e.outvars}
        cotangents = [v for v in env if v in read and v in heavy and is_float(v)]
        if grads and cotangents:
            tied = list(dict.fromkeys([*grads, *cotangents]))
            env.update(zip(tied, barrier([env[v] for v in tied]), strict=True))


def mark(eqns: Sequence[Eqn]) -> str:
    """Returns a hash of equations and their types, also of those in loops and calls."""
    text = ";".join(
        f"{e.primitive.name}:{','.join(v.aval.str_short() for v in e.outvars)}:{','.join(mark(b.eqns) for b in bodies_in(e))}"
        for e in eqns
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def with_derivative(closed: Any, keep: Keep, late: bool = True) -> Flat:
    """Returns the flat function of a closed jaxpr, whose derivative keeps the values that `keep` chooses.

    `keep` is called at each differentiation. `late`: whether XLA must not run equations before they are needed, see `Kept`. It
    does not in the steps of a loop.
    """

    def sealed(kept: Kept, values: list[Any]) -> list[Any]:
        return in_forward_mode(values, kept.graph.refusal) if kept.graph.refusal else values

    def forward(varied: Sequence[bool], *primals: Any) -> tuple[list[Any], Any]:
        kept = keep([i for i, is_varied in enumerate(varied) if is_varied])
        outs, values = kept.run_forward(primals, late)

        def pull_back(values: list[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
            floats = [g for x, g in zip(kept.graph.outs, cotangents, strict=True) if is_float(x)]
            grads = dict(zip(kept.graph.diff, sealed(kept, kept.pull_back(values, floats, late)), strict=True))
            return tuple(grads.get(i) for i in range(len(primals)))

        return sealed(kept, outs), jax.tree_util.Partial(pull_back, values)

    return reverse_differentiable(jex.jaxpr_as_fun(closed), forward, "recompute")
