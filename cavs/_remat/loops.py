"""Plans of a function and of the bodies of its loops: what each graph keeps."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cavs._jaxpr.derivative import type_of
from cavs._jaxpr.equal_jaxprs import equal_jaxprs
from cavs._jaxpr.equations import bind, run_equations, values
from cavs._jaxpr.jaxprs import Env, Eqn, Jaxpr, Var, bodies_in, body_of, is_var, opened, scan_parts
from cavs._jaxpr.names import Names, names_in
from cavs._jaxpr.source_lines import source_line
from cavs._remat.graph import Graph, Kept
from cavs._remat.loop_derivative import TracedLoop, add_dependent, loop_with_derivative
from cavs._remat.offload import longest_kept

# Calls that are inlined, so that loops inside are planned, too. `jax.checkpoint` is not: its user chose what to keep.
_OPENED = ("jit", "pjit", "closed_call", "core_call")

Price = Callable[[str, int, float], float | None]


def chunk_of(name: str) -> str:
    """Returns the name of the graph of one chunk of a loop."""
    return f"{name}c"


@dataclass
class Region:
    """The values that one graph keeps: of the function itself, or of the body of a loop. `times`: how many steps keep them."""

    name: str
    line: str | None
    times: int
    kept: Kept


class _Traced(NamedTuple):
    """A graph, and the calls of `Planner.keep` for the loops inside, with what they returned."""

    graph: Graph
    inner: list[tuple[tuple[Any, ...], Kept]]

    def has_loops(self) -> bool:
        return bool(self.inner) or any(e.primitive.name == "scan" for e in self.graph.forward)

    def keeps(self, inner: Sequence[Kept]) -> bool:
        """Returns whether the loops keep the same values."""
        return len(inner) == len(self.inner) and all(a is b for a, (_, b) in zip(inner, self.inner, strict=True))


@dataclass(eq=False)
class Planner:
    """Differentiates a function. For each graph in it, `price` gives the cost of running a product again.

    Attributes:
        price: from the name of a graph, the ordinal of a costly equation in it, and its FLOPs, to bytes;
            None: never again. If there is no `price` at all, everything is kept that JAX keeps.
        regions: gains what each graph keeps, by its name.
        chunks: of the loops that run in chunks, the number of steps of a chunk.
        saved: a saved plan, which says what to keep instead of `price`.
        names: what the user asks for by name.
        fixed: values of the function itself that are kept in any case.
        host: the share of the kept bytes that are kept in the memory of the host.
        traced: the graphs traced already, by name, differentiated inputs and chunks; shared by the planners of one function.
        bodies: bodies without loops that were traced already, with `diff` and `stored` as in `keep`, and their graphs.
    """

    price: Price | None
    traced: dict[Any, list[_Traced]] = field(default_factory=dict)
    bodies: list[tuple[Any, list[int], list[int], Graph]] = field(default_factory=list)
    chunks: dict[str, int] = field(default_factory=dict)
    regions: dict[str, Region] = field(default_factory=dict)
    names: Names = ()
    saved: dict[str, Any] | None = None
    fixed: Collection[Var] = ()
    host: float = 0
    _inner: list[tuple[tuple[Any, ...], Kept]] = field(default_factory=list)  # the calls of `keep` inside of the present one

    def keep(
        self, closed: Any, diff: Sequence[int], name: str, line: str | None = None, times: int = 1, stored: Sequence[int] = ()
    ) -> Kept:
        """Traces the derivative of a closed jaxpr with respect to the inputs `diff` and chooses what to keep.

        `stored` are the inputs that cost memory if kept.
        """
        before, self._inner = self._inner, []
        key = name, tuple(diff), tuple(sorted(self.chunks.items())), self.price is None
        graph = self._known(key)
        if graph is None:
            self._inner = []
            graph = self._equal_body(closed, diff, stored) if name else None
            if graph is None:
                graph = self._trace(closed, diff, name, times, stored)
                if name and not self._inner:
                    self.bodies.append((closed, list(diff), list(stored), graph))
            self.traced.setdefault(key, []).append(_Traced(graph, self._inner))
        self._inner = before
        price = self.price
        if self.saved is not None:
            kept = graph.saved(self.saved["regions"].get(name))
        else:
            fixed = () if name else self.fixed
            kept = graph.plain() if price is None else graph.choose(lambda k, flops: price(name, k, flops), fixed)
        if self.host:
            kept = graph.keeping(kept.keep, kept.in_bits, longest_kept(graph.forward, kept.keep, self.host, times))
        self.regions.pop(name, None)
        self.regions[name] = Region(name, line, times, kept)
        self._inner.append(((closed, diff, name, line, times, stored), kept))
        return kept

    def _known(self, key: Any) -> Graph | None:
        """Returns a graph that was traced already with the same values kept in its loops. Plans these loops."""
        found = self.traced.get(key, [])
        if not found:  # without loops, the graph of the plan that keeps everything is that of all others
            others = self.traced.get((*key[:-1], not key[-1]), [])
            return next((known.graph for known in others if not known.has_loops()), None)
        kept = [self.keep(*call) for call, _ in found[0].inner]
        return next((known.graph for known in found if known.keeps(kept)), None)

    def _equal_body(self, closed: Any, diff: Sequence[int], stored: Sequence[int]) -> Graph | None:
        """Returns the graph of a loop body without loops that was traced already, as for another layer of a net."""
        places = [list(diff), list(stored)]
        return next((graph for body, *of, graph in self.bodies if of == places and equal_jaxprs(body, closed)), None)

    def _trace(self, closed: Any, diff: Sequence[int], name: str, times: int, stored: Sequence[int]) -> Graph:
        jaxpr, consts = opened(closed)
        inner: list[str] = []
        idle: set[str] = set()

        def function(*args: Any) -> list[Any]:
            inner.clear()
            env: Env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
            self._evaluate(jaxpr, env, {jaxpr.invars[i] for i in diff}, name, times, inner, idle)
            return values(jaxpr.outvars, env)

        graph = Graph.of(function, list(map(type_of, jaxpr.invars)), diff, stored, self.names)
        graph.named.update({name: set() for name in idle - graph.named.keys()})
        return graph

    def _evaluate(
        self, jaxpr: Jaxpr, env: Env, dependent: set[Var], name: str, times: int, inner: list[str], idle: set[str]
    ) -> None:
        """Runs the equations of a jaxpr, and loops with planned derivatives if they depend on what is differentiated.

        `env` and `dependent`, the variables that depend on it, gain the variables of the equations. `idle` gains the names of
        values in loops and the like that do not depend on it: the backward needs none of them.
        """

        def results(e: Eqn, operands: list[Any]) -> Sequence[Any]:
            if e.primitive.name in _OPENED:
                body, consts = body_of(e)
                inside: Env = dict(zip([*body.constvars, *body.invars], [*consts, *operands], strict=True))
                depend = {v for v, x in zip(body.invars, e.invars, strict=True) if is_var(x) and x in dependent}
                self._evaluate(body, inside, depend, name, times, inner, idle)
                outputs = zip(e.outvars, body.outvars, strict=True)
                dependent.update(v for v, x in outputs if is_var(x) and x in depend)
                return values(body.outvars, inside)
            add_dependent([e], dependent)
            if dependent.isdisjoint(e.outvars):
                idle.update(name for body in bodies_in(e) for name in names_in(body))
            elif self.price is not None and e.primitive.name == "scan":
                return self._loop(e, operands, f"{name}/{len(inner)}", times, inner)
            return bind(e, operands)

        run_equations(jaxpr.eqns, env, results)

    def _loop(self, eqn: Eqn, args: Sequence[Any], name: str, times: int, inner: list[str]) -> list[Any]:
        inner.append(name)
        chunk = self.chunks.get(name)
        if chunk:
            return self._in_chunks(eqn, args, chunk_of(name), times, chunk)
        return self._run(TracedLoop.of(eqn), args, name, times, source_line(eqn))

    def _run(self, loop: TracedLoop, args: Sequence[Any], name: str, times: int, line: str | None) -> list[Any]:
        """Runs a loop, whose body is planned."""
        stored = range(loop.consts, loop.consts + loop.carry)
        steps = times * loop.length
        return loop_with_derivative(loop, lambda diff: self.keep(loop.body, diff, name, line, steps, stored))(*args)

    def _in_chunks(self, eqn: Eqn, args: Sequence[Any], name: str, times: int, chunk: int) -> list[Any]:
        """Runs a loop as a loop over chunks of `chunk` steps, and one over the steps that remain.

        The body of the outer loop is planned like any other. If it runs the inner loop again, it keeps the state before each
        chunk, and the inner loop's own values are there for one chunk at a time.
        """
        consts, carry, xs = scan_parts(eqn.params, args)
        length, reverse = eqn.params["length"], eqn.params["reverse"]
        count, rest = divmod(length, chunk)
        spans = [(rest, length), (0, rest)] if reverse else [(0, count * chunk), (count * chunk, length)]
        (first, last), (start, end) = spans
        avals = list(map(type_of, (*consts, *carry)))
        avals += [jax.ShapeDtypeStruct((chunk, *x.shape[1:]), x.dtype) for x in xs]
        steps = eqn.replace(params={**eqn.params, "length": chunk})
        body = jax.make_jaxpr(lambda *flat: bind(steps, flat))(*avals)
        split = [x[first:last].reshape(count, chunk, *x.shape[1:]) for x in xs]
        loop = TracedLoop(body, len(consts), len(carry), count, reverse, 1)
        outs = self._run(loop, [*consts, *carry, *split], name, times, source_line(eqn))
        carry, ys = outs[: len(carry)], [y.reshape(count * chunk, *y.shape[2:]) for y in outs[len(carry) :]]
        if rest:
            ends = eqn.replace(params={**eqn.params, "length": rest})
            outs = self._loop(ends, [*consts, *carry, *(x[start:end] for x in xs)], name + "/rest", times, [])
            carry, tail = outs[: len(carry)], outs[len(carry) :]
            ys = [jnp.concatenate([t, y] if reverse else [y, t]) for y, t in zip(ys, tail, strict=True)]
        return [*carry, *ys]
