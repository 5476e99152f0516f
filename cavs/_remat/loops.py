"""Plans of a function and of the bodies of its loops: what each graph keeps."""

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cavs._jaxpr.derivative import type_of
from cavs._jaxpr.equal_jaxprs import equal_jaxprs
from cavs._jaxpr.equations import bind, is_float, run_equations, values
from cavs._jaxpr.inline import JITTED, inlined
from cavs._jaxpr.jaxprs import Env, Eqn, Var, bodies_in, is_var, opened, scan_parts
from cavs._jaxpr.names import Names, names_in
from cavs._jaxpr.reverse_only import refusal_in
from cavs._jaxpr.source_lines import source_line
from cavs._remat.forms import longest_kept
from cavs._remat.graph import Graph, Kept, with_derivative
from cavs._remat.liveness import estimated_peak

_MOST_POOLED = 16  # elements of a window: its gradient has a term for each


def chunk_of(name: str) -> str:
    """Returns the name of the graph of one chunk of a loop."""
    return f"{name}c"


class Region(NamedTuple):
    """The values that one graph keeps: of the function itself, or of the body of a loop. `times`: how many steps keep them."""

    name: str
    line: str | None
    times: int
    kept: Kept


class Known(NamedTuple):
    """A function that was traced, with what identifies its trace, the calls of `keep` for its loops, and its graph."""

    closed: Any
    places: list[Any]
    calls: list[tuple[Any, Kept]]
    graph: Graph


@dataclass(eq=False)
class Point:
    """One plan of a function and of the bodies of its loops."""

    price: float | None  # bytes for each FLOP of products that run again; `math.inf`: none; None: keep all that JAX keeps
    known: list[Known]  # what was traced already; shared by the plans of one function
    names: Names = ()  # what the user asks for by name
    # Of the loops that run in chunks, the number of steps of a chunk. No other products run again, if there are any.
    chunks: dict[str, int] = field(default_factory=dict)
    fixed: frozenset[Var] = frozenset()  # values of the function itself that are kept in any case
    host: float = 0  # the share of the kept bytes that are kept in the memory of the host
    saved: dict[str, Any] | None = None  # a saved plan, which says what to keep instead of `price`
    regions: dict[str, Region] = field(default_factory=dict)  # what each graph keeps, by its name
    calls: list[tuple[Any, Kept]] = field(default_factory=list)  # of `keep` for the loops inside what is traced; their results

    @property
    def kept(self) -> Kept:
        """The values that the function itself keeps. The memory depends on them alone: its loops keep what they keep."""
        return self.regions[""].kept

    @property
    def bytes(self) -> int:
        """Bytes that live from the forward to the backward."""
        return self.kept.bytes()

    @property
    def flops(self) -> float:
        """FLOPs of products that run again."""
        return sum(region.times * region.kept.flops() for region in self.regions.values())

    @functools.cached_property
    def peak(self) -> int:
        """The bytes of temporary memory, estimated."""
        return estimated_peak(self.kept)

    def as_json(self) -> dict[str, Any]:
        """Returns the plan as JSON can hold it."""
        return {"regions": {name: region.kept.as_json() for name, region in self.regions.items()}, "chunks": self.chunks}

    def keep(
        self, closed: Any, diff: Sequence[int], name: str, line: str | None = None, times: int = 1, stored: Sequence[int] = ()
    ) -> Kept:
        """Traces the derivative of a closed jaxpr with respect to the inputs `diff` and chooses what to keep.

        `stored` are the inputs that cost memory if kept.
        """
        outer, self.calls = self.calls, []
        graph = self._graph(closed, list(diff), name, times, list(stored))
        self.calls = outer
        if self.saved is not None:
            kept = graph.saved(self.saved["regions"].get(name))
        elif self.price is None:
            kept = graph.plain()
        else:
            rank = list(self.regions).index(name) if name in self.regions else len(self.regions)
            may_repeat = not self.chunks or name in map(chunk_of, self.chunks)
            kept = graph.choose(self.price if may_repeat else math.inf, rank, frozenset() if name else self.fixed)
        if self.host:
            kept = graph.keeping(kept.keep, kept.in_bits, longest_kept(graph.forward, kept.keep, self.host, times))
        self.regions[name] = Region(name, line, times, kept)
        self.calls.append(((closed, diff, name, line, times, stored), kept))
        return kept

    def _known(self, closed: Any, places: list[Any]) -> Graph | None:
        """Returns a graph that was traced already, with loops inside that keep the same. Plans these loops."""
        for same in (operator.is_, equal_jaxprs):  # such as the loop of another layer of a net
            if matching := [known for known in self.known if known.places == places and same(known.closed, closed)]:
                kept = [self.keep(*call) for call, _ in matching[0].calls]
                graph = next((known.graph for known in matching if [k for _, k in known.calls] == kept), None)
                if graph is not None and not kept and matching[0].closed is not closed:
                    self.known.append(Known(closed, places, [], graph))
                return graph
        return None

    def _graph(self, closed: Any, diff: list[int], name: str, times: int, stored: list[int]) -> Graph:
        jaxpr, consts = opened(closed)
        eqns, outs = inlined(jaxpr, JITTED)  # so that loops inside are planned, too
        has_loops = any(e.primitive.name == "scan" for e in eqns)
        places = [diff, stored, *([name, self.price is None, self.chunks] if has_loops else [])]
        if (known := self._known(closed, places)) is not None:
            return known
        self.calls = []
        idle: set[str] = set()  # names of values in loops and the like of which the backward needs none

        def function(*args: Any) -> list[Any]:
            dependent, numbers = {jaxpr.invars[i] for i in diff}, itertools.count()

            def results(e: Eqn, operands: list[Any]) -> Sequence[Any]:
                _add_dependent(e, dependent)
                if dependent.isdisjoint(e.outvars):
                    idle.update(*(names_in(body.eqns) for body in bodies_in(e)))
                elif self.price is not None and e.primitive.name == "scan":
                    return self._loop(e, operands, f"{name}/{next(numbers)}", times)
                return [pooled(e, operands[0])] if is_pooling(e) else bind(e, operands)

            env: Env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
            run_equations(eqns, env, results)
            return values(outs, env)

        graph = Graph.of(function, list(map(type_of, jaxpr.invars)), diff, stored, self.names, refusal_in(jaxpr))
        graph.named.update({name: set() for name in idle - graph.named.keys()})
        self.known.append(Known(closed, places, self.calls, graph))
        return graph

    def _loop(self, eqn: Eqn, args: Sequence[Any], name: str, times: int) -> list[Any]:
        """Runs a loop, whose body is planned; maybe as a loop over chunks of some steps, and one over the steps that remain.

        The body of the loop over chunks is planned like any other. If it runs the inner loop again, it keeps the state before
        each chunk, and the inner loop's own values are there for one chunk at a time.
        """
        consts, carry, xs = scan_parts(eqn.params, args)
        length, reverse, unroll, steps = (eqn.params[name] for name in ("length", "reverse", "unroll", "jaxpr"))
        places = range(len(consts), len(consts) + len(carry))

        def run(body: Any, name: str, carry: list[Any], xs: list[Any], length: int, unroll: int) -> tuple[Any, Any]:
            def keep(diff: list[int]) -> Kept:
                return self.keep(body, diff, name, source_line(eqn), times * length, places)

            def step(state: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
                outs = planned(*consts, *state, *x)
                return outs[: len(carry)], outs[len(carry) :]

            planned = with_derivative(body, keep, late=False)
            return lax.scan(step, carry, xs, length=length, reverse=reverse, unroll=unroll)

        size = self.chunks.get(name)
        if not size:
            carry, ys = run(steps, name, carry, xs, length, unroll)
            return [*carry, *ys]
        count, rest = divmod(length, size)
        first, last = (slice(rest, length), slice(rest)) if reverse else (slice(length - rest), slice(length - rest, length))
        types = [*map(type_of, (*consts, *carry)), *(jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for x in xs)]
        inner = eqn.replace(params={**eqn.params, "length": size})
        chunk = jax.make_jaxpr(lambda *flat: bind(inner, flat))(*types)
        split = [x[first].reshape(count, size, *x.shape[1:]) for x in xs]
        carry, ys = run(chunk, chunk_of(name), carry, split, count, 1)
        ys = [y.reshape(count * size, *y.shape[2:]) for y in ys]
        if rest:
            carry, rest_ys = run(steps, f"{name}/rest", carry, [x[last] for x in xs], rest, unroll)
            ys = [jnp.concatenate([z, y] if reverse else [y, z]) for y, z in zip(ys, rest_ys, strict=True)]
        return [*carry, *ys]


def _add_dependent(eqn: Eqn, dependent: set[Var]) -> None:
    """Adds the results of an equation that depend on `dependent` ones, and the references into which it may write them."""
    if eqn.primitive.name != "stop_gradient" and any(is_var(x) and x in dependent for x in eqn.invars):
        dependent.update(v for v in eqn.outvars if is_float(v))
        dependent.update(x for x in eqn.invars if eqn.effects and is_var(x))


def is_pooling(eqn: Eqn) -> bool:
    """Returns whether an equation takes maxima over windows of few elements."""
    params = eqn.params
    if eqn.primitive.name != "reduce_window_max" or {*params["base_dilation"], *params["window_dilation"]} != {1}:
        return False
    return math.prod(params["window_dimensions"]) <= _MOST_POOLED and 0 not in eqn.outvars[0].aval.shape


def pooled(eqn: Eqn, x: jax.Array) -> jax.Array:
    """Runs such an equation. Its gradient goes to the first of the largest elements, as XLA's does.

    It follows from comparisons of elements: bits in place of all that was pooled. XLA looks for maxima again in what was
    pooled, and adds to an array of zeros, which on a GPU may exist from the start.
    """
    window, strides, padding = (eqn.params[name] for name in ("window_dimensions", "window_strides", "padding"))
    shape = eqn.outvars[0].aval.shape

    def elements(x: jax.Array, outside: float) -> list[jax.Array]:
        """Returns an array for each place in a window: its elements of all windows."""
        x = lax.pad(x, x.dtype.type(outside), [(*p, 0) for p in padding])
        grid = itertools.product(*map(range, window))
        return [
            lax.slice(x, at, [i + (n - 1) * s + 1 for i, n, s in zip(at, shape, strides, strict=True)], strides) for at in grid
        ]

    @jax.custom_jvp
    def maximum(x: jax.Array) -> jax.Array:
        return bind(eqn, [x])[0]

    @maximum.defjvp
    def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        best, *others = elements(primals[0], -np.inf)  # as JAX does
        tangent, *tangents = elements(tangents[0], 0)
        for new, of_new in zip(others, tangents, strict=True):
            smaller = ~(best >= new)
            best, tangent = jnp.where(smaller, new, best), jnp.where(smaller, of_new, tangent)
        return maximum(primals[0]), tangent

    return maximum(x)
