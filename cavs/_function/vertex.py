"""What a user writes: `VertexFunction` and the handle `v` with gather, pull, scatter, push (Cavs section 3.1)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cavs._function.gather_all import REDUCERS, NestedGatherAll, over_children, over_padded
from cavs._function.stored import from_stored, key_impl


@dataclasses.dataclass(frozen=True)
class Optimizations:
    """Cavs' optimizations of section 3.5, each of which can be switched off (the ablations of section 5.3).

    - `fusion`: products that share an operand run as one, elementwise maths is left to the compiler to fuse; `False`
      keeps every equation apart.
    - `eager`: what depends on no gather runs as one batch before the levels; `False` runs it level by level.
    - `lazy`: parameter gradients run as one batch after the levels; `False` adds them up task by task.
    """

    fusion: bool = True
    eager: bool = True
    lazy: bool = True


class VertexFunction:
    """A static vertex function F, written once for one vertex: `fn(params, v)`.

    ```python
    def tree_fc(params, v):
        left, right = v.gather(0), v.gather(1)
        h = jnp.tanh(jnp.concatenate([left, right]) @ params["u"] + params["b"] + v.pull())
        v.scatter(h)
        v.push(h)

    F = cavs.VertexFunction(tree_fc, state=(512,), arity=2)
    ```

    **Arguments:**

    - `fn`: `fn(params, v)`, or a dict from kind names to such functions, for graphs with kinds. It must call
      `v.scatter` exactly once and `v.push` at least once, and be pure.
    - `state`: what a vertex scatters: a pytree whose leaves are shapes, `{"c": (512,), "h": (512,)}`, or
      `jax.ShapeDtypeStruct`s. A bare shape takes the dtype of the floating parameters.
    - `arity`: how many children `gather(k)` may name, k = 0 .. arity - 1. 0, the default, for functions that only use
      `gather_all`.
    - `optimizations`: see [`cavs.Optimizations`][].

    **Raises:** `TypeError` or `ValueError` for a function, state or arity that is none; misuse inside `fn` is reported
    when `fn` is traced, at the first `run`.
    """

    def __init__(
        self,
        fn: Callable[[Any, "Vertex"], None] | dict[str, Callable[[Any, "Vertex"], None]],
        *,
        state: Any,
        arity: int = 0,
        optimizations: Optimizations | None = None,
    ):
        fns: dict[Any, Callable[[Any, Vertex], None]] = dict(fn) if isinstance(fn, dict) else {None: fn}
        for name, f in fns.items():
            if not callable(f):
                raise TypeError(
                    f"VertexFunction: fn{'' if name is None else f'[{name!r}]'} is a {type(f).__name__}, wanted a function "
                    "fn(params, v), or a dict from kind names to such functions."
                )
        if not isinstance(arity, int) or arity < 0:
            raise ValueError(f"VertexFunction: arity is {arity!r}, wanted an int >= 0: the children that gather(k) may name.")
        self.fns, self.arity = fns, arity
        self.optimizations = optimizations or Optimizations()
        self._specs, self.state_tree = jax.tree.flatten(state, is_leaf=_is_spec)
        for spec in self._specs:
            if not _is_spec(spec):
                raise TypeError(
                    f"VertexFunction: state has a leaf {spec!r}; wanted shapes, such as "
                    '{"c": (512,), "h": (512,)}, or jax.ShapeDtypeStruct((512,), jnp.bfloat16).'
                )
        if not self._specs:
            raise ValueError('VertexFunction: state is empty; wanted at least one shape, such as {"h": (512,)}.')
        self.key_impls = [key_impl(s) if isinstance(s, jax.ShapeDtypeStruct) else None for s in self._specs]
        self._plans: dict[Any, Any] = {}
        self._nested = False  # whether F calls gather_all within gather_all, as far as is known

    def state_avals(self, params: Any, inputs: Any) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the state's leaves; bare shapes get the dtype of the floating parameters (or inputs)."""
        floats: list[Any] = []
        for tree in (params, inputs):
            floats = floats or [x.dtype for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
        dtype = jnp.result_type(*floats) if floats else jnp.result_type(float)
        return [s if isinstance(s, jax.ShapeDtypeStruct) else jax.ShapeDtypeStruct(s, dtype) for s in self._specs]

    def plan(self, params: Any, inputs: Any, most: int = 4) -> Any:
        """F traced, differentiated and split for these shapes (of one vertex's row for `inputs`); cached. No vertex has more
        than `most` children, which only an F that calls `gather_all` within `gather_all` asks for."""
        from cavs._function.trace import make_plan

        leaves, tree = jax.tree.flatten((params, inputs))
        context = (jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision)  # type: ignore[attr-defined]
        key = (tree, tuple((x.shape, x.dtype, x.weak_type) for x in leaves), context)
        if not self._nested and (key, None) not in self._plans:
            try:
                self._plans[key, None] = make_plan(self, params, inputs, None)
            except NestedGatherAll:
                self._nested = True
        if not self._nested:
            return self._plans[key, None]
        if (key, most) not in self._plans:
            self._plans[key, most] = make_plan(self, params, inputs, most)
        return self._plans[key, most]

    def explain(self, params: Any = None, inputs: Any = None) -> str:
        """How F was split and what it costs: eager, recurrent and lazy equations, fused products, what is kept per
        vertex for the backward, FLOPs, and which engine runs it and why.

        Without arguments: for the shapes of the latest `run`. Else `params` and one vertex's `inputs` (arrays or
        `jax.ShapeDtypeStruct`s).

        **Raises:** `ValueError` where there are no arguments and F has not run yet.
        """
        from cavs._run.explain import explain

        if params is None and inputs is None:
            if not self._plans:
                raise ValueError(
                    "explain: this F has not run yet, so its shapes are unknown; write F.explain(params, inputs) with "
                    "the inputs of ONE vertex (or shapes of them)."
                )
            return explain(self, next(reversed(self._plans.values())))
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), (params, inputs))
        return explain(self, self.plan(*shapes))


def as_arrays(tree: Any, where: str) -> Any:
    """`tree` with all leaves as JAX arrays.

    **Raises:** `TypeError`, in the name of the argument `where`, that names the first leaf that is none.
    """
    try:
        return jax.tree.map(jnp.asarray, tree)
    except TypeError:
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            try:
                jnp.asarray(leaf)
            except TypeError as error:
                raise TypeError(
                    f"{where} has a {type(leaf).__name__} at {jax.tree_util.keystr(path) or 'its root'}, wanted arrays alone. "
                    "Of an Equinox module write params, static = equinox.partition(module, equinox.is_array), and within F "
                    "equinox.combine(params, static)."
                ) from error
        raise


def _is_spec(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct) or (
        isinstance(x, tuple) and all(isinstance(d, int) and not isinstance(d, bool) and d >= 0 for d in x)
    )


class Vertex:
    """The handle `v` that a vertex function gets: the world as one vertex sees it.

    Made by the library. While F is traced for a vertex with children, gathered values are traced; for a leaf they are
    known to be zero, so that a leaf's products with them are skipped.
    """

    def __init__(
        self,
        function: VertexFunction,
        state_avals: list[jax.ShapeDtypeStruct],
        inputs: Any,
        slots: list[Any],
        num_children: Any,
        child: list[Any],
        leaf: bool,
        most: int | None = None,
    ):
        self._function, self._state_avals, self._inputs = function, state_avals, inputs
        self._slots, self._num_children, self._child, self._leaf = slots, num_children, child, leaf
        self._most, self._calls, self._inside = most, 0, False  # children at most; calls of gather_all; whether in one
        self.scattered: list[Any] | None = None
        self.pushed: dict[str | None, Any] = {}

    def pull(self, name: str | None = None) -> Any:
        """This vertex's row of `inputs`; with `name`, of `inputs[name]`."""
        if self._inputs is None:
            raise ValueError("pull: this run has no inputs; pass them: cavs.run(F, params, sched, inputs).")
        if name is None:
            return self._inputs
        if not isinstance(self._inputs, dict) or name not in self._inputs:
            has = sorted(self._inputs) if isinstance(self._inputs, dict) else f"one {type(self._inputs).__name__}, not a dict"
            raise ValueError(f"pull: name is {name!r}, but inputs has {has}. Pass inputs={{{name!r}: ...}} to cavs.run.")
        return self._inputs[name]

    def gather(self, k: int) -> Any:
        """State of child k, in the order the file gave; zeros where there is none."""
        arity = self._function.arity
        if not isinstance(k, int) or not 0 <= k < arity:
            wanted = f"an int from 0 to {arity - 1}" if arity else "no call of gather"
            raise ValueError(
                f"gather: k is {k!r}, wanted {wanted}: arity is {arity}. "
                f"Write VertexFunction(..., arity={k + 1 if isinstance(k, int) and k >= 0 else '...'}), or gather_all "
                "for any number of children."
            )
        return self._slots[k]

    def has_child(self, k: int) -> Any:
        """Whether there is a child k (a traced bool; use `jnp.where`)."""
        if not isinstance(k, int) or k < 0:
            raise ValueError(f"has_child: k is {k!r}, wanted an int >= 0.")
        return self._num_children > k

    def num_children(self) -> Any:
        """How many children this vertex has: int32."""
        return self._num_children

    def is_leaf(self) -> bool:
        """Whether this vertex has no children: a Python bool, `if v.is_leaf(): ...` is fine.

        F is traced twice, for leaves and for the others, so leaves pay only for what they do.
        """
        return self._leaf

    def gather_all(self, fn: Callable[[Any], Any] = lambda state: state, reduce: str = "sum") -> Any:
        """`fn` of every child's state, reduced over ANY number of children, unpadded; zeros where there are none.

        `reduce`: `"sum"`, `"mean"`, `"max"`, or `"softmax"`, for which `fn` returns `(score, value)` and the result is
        the sum of the values weighted by the softmax of the scores over the children. `fn` may use params and values
        of this vertex from outside it. Booleans are summed as int32; the mean of integers is a float.

        `fn` may call `gather_all` again, for sums over pairs of children or attention among them. The inner call is padded
        to the largest number of children that the batch's schedule has room for.
        """
        if reduce not in REDUCERS:
            raise ValueError(f"gather_all: reduce is {reduce!r}, wanted one of {', '.join(map(repr, REDUCERS))}.")

        def of_child(stored: list[Any]) -> Any:
            return fn(self._function.state_tree.unflatten(map(from_stored, stored, self._function.key_impls)))

        if self._leaf:
            out = jax.eval_shape(lambda child: over_padded(of_child, reduce, child, self._num_children, 1), self._child)
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out)
        if self._inside:
            if self._most is None:
                raise NestedGatherAll
            return over_padded(of_child, reduce, self._child, self._num_children, self._most)
        self._calls, self._inside = self._calls + 1, True
        try:
            return over_children(of_child, reduce, self._child, self._num_children, self._calls)
        finally:
            self._inside = False

    def scatter(self, state: Any) -> None:
        """Sends `state` to the parents. Exactly once per vertex function; structure and shapes as `state=` declares."""
        if self.scattered is not None:
            raise ValueError("scatter: called twice; a vertex scatters once. Scatter one pytree with all the state.")
        leaves, tree = jax.tree.flatten(state)
        want = self._function.state_tree
        if tree != want:
            raise ValueError(f"scatter: state has structure {tree}, wanted {want}, as VertexFunction(state=...) declares.")
        for got, aval in zip(leaves, self._state_avals, strict=True):
            if jnp.shape(got) != aval.shape or jnp.result_type(got) != aval.dtype:
                raise ValueError(
                    f"scatter: state has a leaf of shape {jnp.shape(got)} and dtype {jnp.result_type(got)}, wanted "
                    f"{aval.shape} and {aval.dtype}. Change VertexFunction(state=...), or cast: x.astype(jnp.{aval.dtype})."
                )
        self.scattered = [jnp.asarray(x) for x in leaves]

    def push(self, value: Any, name: str | None = None) -> None:
        """Sends `value` to the outside: `run` returns all vertices' values, in a dict where pushes are named."""
        if name in self.pushed:
            which = "an unnamed value" if name is None else repr(name)
            raise ValueError(f"push: {which} was pushed already; give each push a name of its own: v.push(x, 'name').")
        if self.pushed and (name is None) != (None in self.pushed):
            raise ValueError("push: named and unnamed pushes are mixed; name all of them: v.push(x, 'name').")
        self.pushed[name] = jax.tree.map(jnp.asarray, value)
