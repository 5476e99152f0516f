"""The plan of F: F traced for every kind and role, rewritten, and split. Engines run plans."""

import dataclasses

import jax

from cavs._function.joint import RoleProgram
from cavs._function.keep_options import KeepOptions
from cavs._function.raw_keys import key_impl, stored_aval
from cavs._function.split import Split, split, split_leaf
from cavs._function.trace import ArgumentShapes, agreed, trace_role
from cavs._function.transpose import no_derivative
from cavs._function.vertex import VertexFunction
from cavs._jaxpr.equations import is_float
from cavs._jaxpr.jaxprs import Arrays, PyTreeDef, is_var
from cavs._jaxpr.memo import memoized


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionPlan:
    """What engines need to know of F for given shapes of params and inputs."""

    function: VertexFunction
    state_avals: list[jax.ShapeDtypeStruct]  # shapes and dtypes of the leaves of the state, as stored
    push_avals: list[jax.ShapeDtypeStruct]  # shapes and dtypes of the leaves of a push, as stored
    push_tree: PyTreeDef  # the pytree that a vertex pushes
    push_impls: list[str | None]  # per leaf of a push, the generator's name if it holds keys of `jax.random`, else `None`
    leaf: dict[str | None, RoleProgram]  # F at leaves, by kind
    inner: dict[str | None, Split]  # F at vertices with children, by kind
    shapes: ArgumentShapes  # for which F was traced

    @property
    def no_derivative(self) -> str:
        """What to say of the first equation of F that JAX cannot differentiate in reverse mode; empty if there is none.

        Equations of fixed arguments alone come last, as some parts of F are differentiated with respect to these, too.
        """
        refusals = (
            no_derivative(role.written.eqns, role.written.outs, role.written_fixed if exactly else frozenset())
            for exactly in (True, False)
            for role in self.roles
        )
        return next(filter(None, refusals), "")

    @property
    def reads_edges(self) -> bool:
        """Whether `gather_all` reads the edges of `run`."""
        return any(role.reads_edges for role in self.roles)

    @property
    def roles(self) -> list[RoleProgram]:
        """F at leaves, and at vertices with children, of every kind."""
        return [*self.leaf.values(), *(part.role for part in self.inner.values())]

    @memoized
    def traced(self) -> "FunctionPlan":
        """Returns the plan without the functions of the user, and without what was compiled: JAX's caches keep it alive."""
        return dataclasses.replace(self, function=self.function.traced())

    @memoized
    def leaf_part(self, kind: str | None) -> Split:
        """Returns F at the leaves of a kind, for an engine that runs them as a level."""
        part = split_leaf(self.leaf[kind])
        return part.keeping(self.overwritten, KeepOptions()) if self.overwritten else part

    def rows_and_edges(self, leaves: Arrays) -> tuple[Arrays, Arrays]:
        """Divides the leaves of `(inputs, edges)` into the leaves of each."""
        count = len(self.roles[0].inputs)
        return leaves[:count], leaves[count:]

    @property
    def push_states(self) -> list[int] | None:
        """For each push the leaf of the state that it is, if ALL pushes are scattered states; else `None`."""
        leaves: list[int] = []
        for j in range(len(self.push_avals)):
            hits = set(range(len(self.state_avals)))
            for role in self.roles:
                hits &= {i for i, s in enumerate(role.states) if s is role.pushes[j] and is_var(s)}
            if not hits:
                return None
            leaves.append(min(hits))
        return leaves

    @property
    def overwritten(self) -> frozenset[int]:
        """The leaves of the state whose rows their cotangents overwrite."""
        return next(iter(self.inner.values())).forward.overwritten

    @property
    def names(self) -> set[str]:
        """The names of values of the recurrent part."""
        return {name for part in self.inner.values() for name in part.joint.names}

    @memoized
    def keeping(self, options: KeepOptions) -> "FunctionPlan":
        """Returns the plan with other options for what the backward saves (`_function.keeping`)."""
        leaves = self._overwritable() if options.overwrite else frozenset()
        if not (leaves or any(options[1:])):
            return self
        return dataclasses.replace(self, inner={kind: part.keeping(leaves, options) for kind, part in self.inner.items()})

    @memoized
    def without_eager_part(self) -> "FunctionPlan":
        """Returns the plan whose levels compute what the eager part does here. It is this one if that is nothing."""
        if not any(part.eager.eqns for part in self.inner.values()):
            return self
        return dataclasses.replace(self, inner={kind: split(part.role, False) for kind, part in self.inner.items()})

    @memoized
    def for_forward_mode(self) -> "FunctionPlan":
        """Returns the plan whose levels follow derivative rules if JAX differentiates them in forward mode.

        It is this one if the levels call no functions with such rules.
        """
        inner = {kind: part.for_forward_mode() for kind, part in self.inner.items()}
        return self if all(inner[kind] is part for kind, part in self.inner.items()) else dataclasses.replace(self, inner=inner)

    def fixing(self, params: tuple[bool, ...], rows: tuple[bool, ...]) -> "FunctionPlan":
        """Returns the plan that computes no cotangents of some arguments, as of frozen weights.

        `params`: for each leaf of the parameters, whether it is one of them; or nothing, if none is. `rows`: the same for the
        leaves of `(inputs, edges)`.
        """
        are_fixed = zip(self.roles[0].arguments, (*params, *rows), strict=False)
        # Integers have no cotangents in any case.
        places = tuple(i for i, (v, is_fixed) in enumerate(are_fixed) if is_fixed and is_float(v))
        return self._fixing(places) if places else self

    @memoized
    def _fixing(self, places: tuple[int, ...]) -> "FunctionPlan":
        def fixed(role: RoleProgram) -> RoleProgram:
            return dataclasses.replace(role, fixed=frozenset(role.arguments[i] for i in places))

        leaf = {kind: fixed(role) for kind, role in self.leaf.items()}
        inner = {kind: split(fixed(part.role), self.function.optimizations.eager) for kind, part in self.inner.items()}
        return dataclasses.replace(self, leaf=leaf, inner=inner)

    def _overwritable(self) -> frozenset[int]:
        """Returns the leaves of the state whose rows the cotangents of a forest may overwrite."""
        leaves = set(range(len(self.state_avals)))
        for part in self.inner.values():
            leaves &= part.can_overwrite(self.function.arity)
        return frozenset(leaves - set(self.push_states or ()))


def make_plan(function: VertexFunction, shapes: ArgumentShapes, most: int | None) -> FunctionPlan:
    """Traces every kind of F for leaves and for vertices with children.

    Raises:
        NestedGatherAll: `most` is `None`, and F calls `gather_all` within `gather_all`.
        TypeError, ValueError: misuse inside F.

    `most`: the largest number of children, if F calls `gather_all` within `gather_all`; else `None`.
    """
    leaf, inner, pushes = {}, {}, {}
    for kind in function.fns:
        leaf[kind], pushes[kind, True] = trace_role(function, kind, shapes, most, leaf=True)
        if inner and function.mixes:  # all kinds have the same program
            inner[kind] = next(iter(inner.values()))
            continue
        role, pushes[kind, False] = trace_role(function, kind, shapes, most, leaf=False)
        inner[kind] = split(role, function.optimizations.eager)
    pushed = agreed(pushes)
    state_avals = [stored_aval(a) for a in function.state_avals(shapes.params, shapes.inputs)]
    push_avals = [stored_aval(a) for a in pushed.avals]
    return FunctionPlan(
        function, state_avals, push_avals, pushed.tree, [key_impl(a) for a in pushed.avals], leaf, inner, shapes
    )
