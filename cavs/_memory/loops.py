"""Derivatives that keep the values of a plan, for a function and for the bodies of its loops."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from cavs._function.equations import bind, is_float, lines_of
from cavs._function.jaxprs import Eqn, Var, body_of, opened, scan_parts
from cavs._function.lines import source_line
from cavs._function.names import Names
from cavs._memory.graph import Graph, Kept, differentiated, shape, value
from cavs._memory.saved_plan import kept_as_saved

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

    def keeps(self, inner: Sequence[Kept]) -> bool:
        """Whether the loops keep the same values."""
        return len(inner) == len(self.inner) and all(
            a.graph is b.graph and a.keep == b.keep for a, (_, b) in zip(inner, self.inner, strict=True)
        )


@dataclass(eq=False)
class Planner:
    """Differentiates a function. For each graph in it, `price` gives the cost of running a product again.

    Attributes:
        price: from the name of a graph, the ordinal of a costly equation in it, and its FLOPs, to bytes;
            None: never again. If there is no `price` at all, everything is kept that JAX keeps.
        regions: gains what each graph keeps, by its name.
        chunks: of the loops that run in chunks, the number of steps of a chunk.
        saved: a saved plan, which says what to keep instead of `price`.
        names: what the user asks for by name; values of loops are not offloaded.
        fixed: values of the function itself that are kept in any case.
        traced: the graphs traced already, by name, differentiated inputs and chunks; shared by the planners of one function.
    """

    price: Price | None
    traced: dict[Any, list[_Traced]] = field(default_factory=dict)
    chunks: dict[str, int] = field(default_factory=dict)
    regions: dict[str, Region] = field(default_factory=dict)
    names: Names = ()
    saved: dict[str, Any] | None = None
    fixed: Collection[Var] = ()
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
            graph = self._trace(closed, diff, name, times, stored)
            self.traced.setdefault(key, []).append(_Traced(graph, self._inner))
        self._inner = before
        price = self.price
        if self.saved is not None:
            kept = kept_as_saved(graph, name, self.saved)
        else:
            fixed = () if name else self.fixed
            kept = graph.plain() if price is None else graph.choose(lambda k, flops: price(name, k, flops), fixed)
        self.regions.pop(name, None)
        self.regions[name] = Region(name, line, times, kept)
        self._inner.append(((closed, diff, name, line, times, stored), kept))
        return kept

    def _known(self, key: Any) -> Graph | None:
        """Returns a graph that was traced already with the same values kept in its loops. Plans these loops."""
        found = self.traced.get(key, [])
        if not found:  # without loops, the graph is that of the plan that keeps everything
            whole = self.traced.get((*key[:-1], True), [])
            return next((known.graph for known in whole if not any(e.primitive.name == "scan" for e in known.graph.eqns)), None)
        asked = [self.keep(*call) for call, _ in found[0].inner]
        return next((known.graph for known in found if known.keeps(asked)), None)

    def _trace(self, closed: Any, diff: Sequence[int], name: str, times: int, stored: Sequence[int]) -> Graph:
        jaxpr, consts = opened(closed)
        inner: list[str] = []

        def function(*args: Any) -> list[Any]:
            inner.clear()
            return _evaluate(jaxpr, consts, args, lambda e, x: self._equation(e, x, f"{name}/{len(inner)}", times, inner))

        return differentiated(function, [shape(v) for v in jaxpr.invars], diff, stored, self._names(graph_name=name))

    def _names(self, graph_name: str) -> Names:
        """The options of one graph."""
        return self.names if not graph_name else tuple((n, way if way != "offload" else "keep") for n, way in self.names)

    def _equation(self, eqn: Eqn, args: Sequence[Any], name: str, times: int, inner: list[str]) -> list[Any]:
        if eqn.primitive.name != "scan" or self.price is None:
            return bind(eqn, args)
        inner.append(name)
        chunk = self.chunks.get(name)
        if chunk:
            return self._in_chunks(eqn, args, chunk_of(name), times, chunk)
        body = eqn.params["jaxpr"]
        invars = opened(body)[0].invars
        _, carry, _ = scan_parts(eqn.params, cast(Any, range(len(invars))))
        steps = times * eqn.params["length"]
        line, stored = source_line(eqn), cast(list[int], carry)
        step = with_derivative(body, lambda diff: self.keep(body, diff, name, line, steps, stored), late=False)
        planned = jax.make_jaxpr(step)(*map(shape, invars))
        return bind(eqn.replace(params={**eqn.params, "jaxpr": planned}), args)

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
        avals = list(map(shape, (*consts, *carry)))
        avals += [jax.ShapeDtypeStruct((chunk, *x.shape[1:]), x.dtype) for x in xs]
        steps = eqn.replace(params={**eqn.params, "length": chunk})
        closed = jax.make_jaxpr(lambda *flat: bind(steps, flat))(*avals)
        stored = range(len(consts), len(consts) + len(carry))
        line = source_line(eqn)
        body = with_derivative(closed, lambda diff: self.keep(closed, diff, name, line, times * count, stored), late=False)

        def run_chunk(state: Any, x: Any) -> tuple[Any, Any]:
            outs = body(*consts, *state, *x)
            return outs[: len(carry)], outs[len(carry) :]

        split = [x[first:last].reshape(count, chunk, *x.shape[1:]) for x in xs]
        carry, ys = jax.lax.scan(run_chunk, carry, split, length=count, reverse=reverse)
        ys = [y.reshape(count * chunk, *y.shape[2:]) for y in ys]
        if rest:
            ends = eqn.replace(params={**eqn.params, "length": rest})
            outs = self._equation(ends, [*consts, *carry, *(x[start:end] for x in xs)], name + "/rest", times, [])
            carry, tail = outs[: len(carry)], outs[len(carry) :]
            ys = [jax.numpy.concatenate([t, y] if reverse else [y, t]) for y, t in zip(ys, tail, strict=True)]
        return [*carry, *ys]


def with_derivative(closed: Any, keep: Callable[[list[int]], Kept], late: bool) -> Any:
    """Returns the flat function of a closed jaxpr, whose derivative keeps the values that `keep` chooses.

    `keep` is called at each differentiation with the indices of the differentiated inputs. `late`: see `Kept.pull_back`.
    """
    jaxpr, consts = opened(closed)

    def plain(*args: Any) -> list[Any]:
        return _evaluate(jaxpr, consts, args, bind)

    def forward(*primals: Any) -> tuple[list[Any], _Saved]:
        kept = keep([i for i, x in enumerate(primals) if x.perturbed and is_float(jaxpr.invars[i])])
        outs, values = kept.forward([x.value for x in primals], late)
        return outs, _Saved(values, kept, len(primals))

    def backward(saved: _Saved, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        graph = saved.kept.graph
        into = [_filled(cotangents[i], graph.outs[i]) for i in graph.float_outs]
        grads = dict(zip(graph.diff, saved.kept.pull_back(saved.values, into, late), strict=True))
        return tuple(grads.get(i) for i in range(saved.num_inputs))

    planned = jax.custom_vjp(plain)
    planned.defvjp(forward, backward, symbolic_zeros=True)
    return planned


@jax.tree_util.register_pytree_node_class
@dataclass(eq=False)
class _Saved:
    """The values that the forward passes to the backward."""

    values: list[Any]
    kept: Kept
    num_inputs: int

    def tree_flatten(self) -> tuple[tuple[list[Any]], tuple[Kept, int]]:
        return (self.values,), (self.kept, self.num_inputs)

    @classmethod
    def tree_unflatten(cls, aux: tuple[Kept, int], children: tuple[list[Any]]) -> "_Saved":
        return cls(children[0], *aux)


def _filled(cotangent: Any, out: Any) -> Any:
    return jnp.zeros(out.aval.shape, out.aval.dtype) if isinstance(cotangent, SymbolicZero) else cotangent


def _evaluate(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], equation: Callable[[Eqn, Sequence[Any]], list[Any]]
) -> list[Any]:
    """Runs a jaxpr, each equation by `equation`, with plain calls opened."""
    env = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        values = [value(x, env) for x in eqn.invars]
        with lines_of(eqn):
            outs = _evaluate(*body_of(eqn), values, equation) if eqn.primitive.name in _OPENED else equation(eqn, values)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [value(x, env) for x in jaxpr.outvars]
