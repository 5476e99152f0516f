"""What a user writes: `VertexFunction`, and the handle `v` with gather, pull, scatter and push (Cavs, section 3.1)."""

import copy
import dataclasses
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, NoReturn, Self, TypeAlias, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from cavs._function.arrays import as_arrays
from cavs._function.gather_all import REDUCERS, NestedGatherAll, check_child_function, over_children, over_padded
from cavs._function.raw_keys import from_stored, key_impl
from cavs._graphs.arguments import check_takes
from cavs._graphs.checks import check_bool, check_choice, check_type
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.memo import MEMO
from cavs._jaxpr.settings import promoting


@dataclasses.dataclass(frozen=True)
class Optimizations:
    """The optimizations of Cavs, section 3.5. Each can be switched off (the ablations of section 5.3).

    Attributes:
        fusion: products that share an operand run as one, and the compiler fuses elementwise operations. `False` keeps every
            equation apart.
        eager: what depends on no gather runs as one batch before the levels. `False` runs it level by level.
        lazy: parameter gradients run as one batch after the levels. `False` adds them up task by task.

    Raises:
        TypeError: an attribute is no bool.
    """

    fusion: bool = True
    eager: bool = True
    lazy: bool = True

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_bool(f"Optimizations: {name}", value)


Pushed = TypeVar("Pushed")  # the pytree that F pushes, with a row for each vertex
OneVertex: TypeAlias = Callable[[Any, "Vertex"], None]


def _left_out(params: PyTree, v: "Vertex") -> NoReturn:
    raise AssertionError("the function of a plan is traced again")


class VertexFunction(Generic[Pushed]):
    """A static vertex function F, written once for one vertex: `fn(params, v)` (Cavs, section 3.1).

    ```python
    def tree_fc(params, v):
        left, right = v.gather(0), v.gather(1)
        h = jnp.tanh(jnp.concatenate([left, right]) @ params["u"] + params["b"] + v.pull())
        v.scatter(h)
        v.push(h)

    F = cavs.VertexFunction(tree_fc, state=(512,), arity=2)
    ```

    F has no batch axis: `v.pull()` returns one vertex's row, and `v.gather(k)` one child's state.
    [`cavs.run`][] evaluates F for all vertices of a batch at once.

    Args:
        fn: `fn(params, v)`, or a dict from kind names to such functions, for graphs with kinds. It must call `v.scatter`
            exactly once and `v.push` at least once, and be pure.
        state: what a vertex scatters: a pytree whose leaves are shapes, `{"c": (512,), "h": (512,)}`, or
            `jax.ShapeDtypeStruct`s. A bare shape takes the dtype of the floating parameters.
        arity: how many children `gather(k)` may name, k = 0 .. arity - 1. The default, 0, is for functions that only use
            `gather_all`.
        optimizations: see [`cavs.Optimizations`][].

    Raises:
        TypeError: `fn` is no function of two arguments, `state` has a leaf that is not a shape, or `optimizations` is
            something else.
        ValueError: `arity` is not an int >= 0, or `state` has no leaves.

    Misuse inside `fn` is reported when `fn` is traced, at the first `run`.

    For a type checker, F pushes one array, and so [`cavs.run`][] returns one. If F pushes more, write
    `cavs.VertexFunction[dict[str, jax.Array]](fn, state=(512,))`.
    """

    @overload
    def __init__(
        self: "VertexFunction[jax.Array]",
        fn: OneVertex | dict[str, OneVertex],
        *,
        state: PyTree,
        arity: int = 0,
        optimizations: Optimizations | None = None,
    ): ...
    @overload
    def __init__(
        self, fn: OneVertex | dict[str, OneVertex], *, state: PyTree, arity: int = 0, optimizations: Optimizations | None = None
    ): ...
    def __init__(
        self, fn: OneVertex | dict[str, OneVertex], *, state: PyTree, arity: int = 0, optimizations: Optimizations | None = None
    ):
        fns: dict[Any, OneVertex] = {**fn} if isinstance(fn, dict) else {None: fn}
        for name, f in fns.items():
            where = "fn" if name is None else f"fn[{name!r}]"
            write = "def F(params, v), or a dict from kind names to such functions"
            check_takes(f"VertexFunction: {where}", f, "params", "v", write=write)
        if not isinstance(arity, int | np.integer) or arity < 0:
            raise ValueError(
                f"VertexFunction: arity: got {arity!r}; expected an int >= 0, the number of children that gather(k) may name."
            )
        expected = "cavs.Optimizations. Write optimizations=cavs.Optimizations(lazy=False), for instance"
        check_type("VertexFunction: optimizations", optimizations, Optimizations | None, expected)
        self.fns, self.arity = fns, int(arity)
        self.optimizations = optimizations or Optimizations()
        self._specs, self.state_tree = jax.tree.flatten(state, is_leaf=_is_spec)
        for spec in self._specs:
            if not _is_spec(spec):
                raise TypeError(
                    f"VertexFunction: state: got a leaf {spec!r}; expected shapes. Write "
                    '{"c": (512,), "h": (512,)}, or jax.ShapeDtypeStruct((512,), jnp.bfloat16).'
                )
        if not self._specs:
            raise ValueError('VertexFunction: state: got no leaves; expected at least one shape. Write {"h": (512,)}.')
        self.key_impls = [key_impl(s) if isinstance(s, jax.ShapeDtypeStruct) else None for s in self._specs]
        self.nests_gather_all = False  # set when F is traced and calls `gather_all` within `gather_all`
        # The kinds, by number, of vertices with children, if their tasks mix kinds (`_function.mixed`).
        self.mixes: dict[int, str] = {}
        self._original: Callable[[], VertexFunction | None] | None = None  # a weak reference; see `traced`

    def __getstate__(self) -> dict[str, Any]:
        """Returns what copies and pickles hold: no results that were computed once for this object."""
        return {name: x for name, x in vars(self).items() if name != MEMO}

    def traced(self) -> Self:
        """Returns a copy for plans, without the functions: these may refer to anything, such as a jitted step and arrays."""
        copied = copy.copy(self)
        copied.fns, copied._original = dict.fromkeys(self.fns, _left_out), weakref.ref(self)
        return copied

    @property
    def original(self) -> "VertexFunction | None":
        """The function of which this is the `traced` copy, while it exists; or this one."""
        return self if self._original is None else self._original()

    def __repr__(self) -> str:
        names = {kind: getattr(fn, "__name__", type(fn).__name__) for kind, fn in self.fns.items()}
        fn = names.get(None) or "{" + ", ".join(f"{kind!r}: {name}" for kind, name in names.items()) + "}"
        state = self.state_tree.unflatten(_Written(spec) for spec in self._specs)
        return f"VertexFunction({fn}, state={state}, arity={self.arity})"

    def state_avals(self, params: PyTree, inputs: PyTree) -> list[jax.ShapeDtypeStruct]:
        """Returns shapes and dtypes of the state's leaves. Bare shapes get the dtype of the floating parameters (or inputs).

        Numbers of Python, whose type is weak, count only if there are no others.
        In JAX's 32 bits a float64 is a float32, as for all arrays.
        """
        floats: list[jnp.dtype] = []
        for tree in (params, inputs):
            leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
            floats = floats or [x.dtype for x in leaves if not getattr(x, "weak_type", False)] or [x.dtype for x in leaves]
        dtype = promoting(jnp.result_type)(*floats) if floats else jnp.result_type(float)
        shaped = [s if isinstance(s, jax.ShapeDtypeStruct) else jax.ShapeDtypeStruct(s, dtype) for s in self._specs]
        return [a if key_impl(a) else a.update(dtype=jax.dtypes.canonicalize_dtype(a.dtype)) for a in shaped]


def check_function(where: str, F: object) -> None:
    """Raises `TypeError` if the argument `F` of the function `where` is something else."""
    write = "Write cavs.VertexFunction(fn, state=...), or program.vertex_function() for a ready vertex program"
    check_type(f"{where}: F", F, VertexFunction, f"a cavs.VertexFunction. {write}")


class _Written:
    """A leaf of `state=` in a text: `(8,)`, or `bfloat16[8]` if it has a dtype."""

    def __init__(self, spec: Any):
        self._spec = spec

    def __repr__(self) -> str:
        spec = self._spec
        return f"{spec.dtype}{list(spec.shape)}" if isinstance(spec, jax.ShapeDtypeStruct) else repr(tuple(map(int, spec)))


def _is_spec(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct) or (
        isinstance(x, tuple) and all(isinstance(d, int | np.integer) and not isinstance(d, bool) and d >= 0 for d in x)
    )


@dataclasses.dataclass
class _Gathers:
    """How F calls `gather_all` while it is traced: shared by all handles of a vertex."""

    calls: int = 0  # the number of calls, without those inside others
    inside: bool = False  # whether one of them is being traced
    reads_edges: bool = False  # whether one of them had `edges=True`


@dataclasses.dataclass(eq=False, repr=False)
class Vertex:
    """The handle `v` that a vertex function gets: the graph as one vertex sees it.

    The library creates it. While F is traced for a vertex with children, gathered values are traced. For a leaf they are known
    to be zero, so that products with them are skipped.
    """

    _function: VertexFunction
    _state_avals: list[jax.ShapeDtypeStruct]
    _inputs: PyTree
    _edges: PyTree
    _slots: list[PyTree]
    _num_children: Any
    _child: list[jax.Array]
    _leaf: bool
    _most: int | None = None  # the largest number of children, if `gather_all` may be called within `gather_all`
    _gathers: _Gathers = dataclasses.field(default_factory=_Gathers, init=False)
    scattered: list[jax.Array] | None = dataclasses.field(default=None, init=False)
    pushed: dict[str | None, PyTree] = dataclasses.field(default_factory=dict, init=False)

    def pull(self, name: str | None = None) -> PyTree:
        """Returns this vertex's row of `inputs`; with `name`, of `inputs[name]`.

        Raises:
            ValueError: the run has no inputs, or `inputs` has no entry `name`.
        """
        if self._inputs is None:
            raise ValueError("pull: got a run without inputs; expected inputs. Write cavs.run(F, params, sched, inputs).")
        if name is None:
            return self._inputs
        if not isinstance(self._inputs, dict) or not isinstance(name, Hashable) or name not in self._inputs:
            kind = "an array" if isinstance(self._inputs, jax.Array) else f"a {type(self._inputs).__name__}"
            what = f"has {sorted(self._inputs)}" if isinstance(self._inputs, dict) else f"is {kind}, not a dict"
            raise ValueError(
                f"pull: name: got {name!r}; expected a key of inputs, which {what}. "
                f"Write inputs={{{name!r}: ...}} in cavs.run, or v.pull() for all of inputs."
            )
        return self._inputs[name]

    def gather(self, k: int) -> PyTree:
        """Returns the state of child k, in the order of the file; zeros if there is no child k.

        Raises:
            ValueError: `k` is not an int from 0 to arity - 1.
        """
        arity = self._function.arity
        if not isinstance(k, int | np.integer) or not 0 <= k < arity:
            expected = f"an int from 0 to {arity - 1}, as arity is {arity}"
            if not arity:
                expected = "no call of gather, as this VertexFunction has arity 0, the default"
            raise ValueError(
                f"gather: k: got {k!r}; expected {expected}. "
                f"Write VertexFunction(..., arity={k + 1 if isinstance(k, int | np.integer) and k >= 0 else '...'}), or "
                "gather_all for any number of children."
            )
        return self._slots[k]

    def has_child(self, k: int) -> jax.Array:
        """Returns whether there is a child k: a traced bool, for `jnp.where`.

        Raises:
            ValueError: `k` is not an int >= 0.
        """
        if not isinstance(k, int | np.integer) or k < 0:
            raise ValueError(f"has_child: k: got {k!r}; expected an int >= 0.")
        return self._num_children > k

    def num_children(self) -> jax.Array:
        """Returns how many children this vertex has: a traced int32."""
        return self._num_children

    def is_leaf(self) -> bool:
        """Returns whether this vertex has no children: a Python bool, so that F may write `if v.is_leaf(): ...`.

        F is traced twice, for leaves and for the other vertices, so leaves pay only for what they do.
        """
        return self._leaf

    def gather_all(self, fn: Callable[..., PyTree] = lambda state: state, reduce: str = "sum", edges: bool = False) -> PyTree:
        """Returns `fn` of every child's state, reduced over ANY number of children; zeros if there are none. Nothing is padded.

        `fn` may use params and values of this vertex from outside it. Booleans are summed as int32; the mean of integers is a
        float.

        `fn` may call `gather_all` again, for sums over pairs of children or attention among them. The inner call is padded to
        the largest number of children that the batch's schedule has room for.

        Args:
            fn: takes a child's state, a pytree like `state=`; with `edges`, `fn(state, edge)` takes the edge's row, too.
            reduce: `"sum"`, `"mean"`, `"max"`, or `"softmax"`. For `"softmax"`, `fn` returns `(score, value)`, and the result
                is the sum of the values, weighted by the softmax of the scores over the children.
            edges: whether `fn` reads the `edges` of [`cavs.run`][], which have a row for each edge to a child.

        Raises:
            TypeError: `fn` is no function of one argument, or, with `edges`, of two; or `edges` is no bool.
            ValueError: an unknown `reduce`, `fn` returns no `(score, value)` for `"softmax"`, or the run has no edges.
        """
        check_choice("gather_all: reduce", reduce, REDUCERS)
        check_child_function(fn, edges, self._edges)
        self._gathers.reads_edges |= edges
        rows, tree = jax.tree.flatten(self._edges if edges else None)
        count, child = len(self._child), [*self._child, *rows]

        def of_child(stored: list[jax.Array]) -> PyTree:
            state = self._function.state_tree.unflatten(map(from_stored, stored[:count], self._function.key_impls))
            return fn(state, tree.unflatten(stored[count:])) if edges else fn(state)

        if self._leaf:
            out = jax.eval_shape(lambda child: over_padded(of_child, reduce, child, self._num_children, 1), child)
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out)
        if self._gathers.inside:
            if self._most is None:
                raise NestedGatherAll
            return over_padded(of_child, reduce, child, self._num_children, self._most)
        self._gathers.calls, self._gathers.inside = self._gathers.calls + 1, True
        try:
            return over_children(of_child, reduce, child, self._num_children, self._gathers.calls)
        finally:
            self._gathers.inside = False

    def scatter(self, state: PyTree) -> None:
        """Sends `state` to the parents. F calls it exactly once, with the structure and shapes that `state=` declares.

        Raises:
            TypeError: `state` has something else than arrays and numbers.
            ValueError: it is called twice, or the structure, a shape or a dtype differs from `state=`.
        """
        if self.scattered is not None:
            raise ValueError("scatter: got a second call; expected one. Write one scatter of a pytree with all the state.")
        tree, expected = jax.tree.structure(state), self._function.state_tree
        if tree != expected:
            raise ValueError(
                f"scatter: state: got structure {tree}; expected {expected}, as VertexFunction(state=...) declares."
            )
        leaves = jax.tree.leaves(as_arrays(state, "scatter: state"))
        for leaf, aval in zip(leaves, self._state_avals, strict=True):
            shape, dtype = leaf.shape, leaf.dtype
            if shape != aval.shape or dtype != aval.dtype:
                batched = len(shape) > len(aval.shape) and shape[len(shape) - len(aval.shape) :] == aval.shape
                hint = " F is written for one vertex, without a batch axis." if batched else ""
                raise ValueError(
                    f"scatter: state: got a leaf of shape {shape} and dtype {dtype}; expected {aval.shape} and {aval.dtype}."
                    f"{hint} Change VertexFunction(state=...), or cast: x.astype(jnp.{aval.dtype})."
                )
        self.scattered = leaves

    def push(self, value: PyTree, name: str | None = None) -> None:
        """Sends `value` to the outside. `run` returns the values of all vertices, in a dict if pushes are named.

        Raises:
            TypeError: `value` has something else than arrays and numbers, or `name` is no str.
            ValueError: `name` was pushed already, or named and unnamed pushes are mixed.
        """
        check_type("push: name", name, str | None, "a str. Write v.push(value, 'name')")
        if name in self.pushed:
            shown = "an unnamed value" if name is None else repr(name)
            raise ValueError(f"push: got {shown} twice; expected a name of its own for each push. Write v.push(x, 'name').")
        if self.pushed and (name is None) != (None in self.pushed):
            raise ValueError("push: got named and unnamed pushes; expected names for all of them. Write v.push(x, 'name').")
        self.pushed[name] = as_arrays(value, "push: value")

    @property
    def _value(self) -> PyTree:
        """What F pushed, as `run` returns it."""
        return self.pushed[None] if None in self.pushed else self.pushed

    def _with_inputs(self, inputs: PyTree) -> "Vertex":
        """Returns a handle of this vertex for another vertex function: it pulls `inputs`, and scatters and pushes by itself."""
        inner = copy.copy(self)
        inner._inputs, inner.scattered, inner.pushed = inputs, None, {}
        return inner
