"""Values that a user has named with `jax.ad_checkpoint.checkpoint_name`, and what is to become of them under a memory plan."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from cavs._jaxpr.equations import without
from cavs._jaxpr.jaxprs import Atom, Eqn, Var, all_equations, is_var

WAYS = ("keep", "recompute", "offload")
Names = tuple[tuple[str, str], ...]  # (name, one of `WAYS`)
WHOLE_BATCH = "sum over the whole batch"  # `cavs.data.total` marks its results with this name: no user can ask for it


def names_of(names: Mapping[str, str] | None, function: str, ways: Sequence[str] = WAYS) -> Names:
    """Checks the argument `names` of a user, a dict from names to ways.

    Raises `ValueError` if `names` is no dict from names to `ways`.
    """
    names = {} if names is None else names
    wrong = not isinstance(names, Mapping) or [(n, way) for n, way in names.items() if way not in ways]
    if wrong:
        got = repr(names) if wrong is True else f"{wrong[0][1]!r} for {wrong[0][0]!r}"
        raise ValueError(
            f"{function}: names: got {got}; expected a dict from names to {', '.join(map(repr, ways))}. Name a value with "
            "jax.ad_checkpoint.checkpoint_name(x, 'gates') and write names={'gates': 'recompute'}."
        )
    return tuple(sorted(names.items()))


def without_names(eqns: Sequence[Eqn], outs: Sequence[Atom]) -> tuple[list[Eqn], list[Atom], dict[str, set[Var]]]:
    """Removes the equations that name values, so that a value is one variable.

    Returns the other equations, the outputs, and the values by their names, without inputs and literals.
    """
    named: dict[str, list[Var]] = {}
    computed = {v for e in eqns for v in e.outvars}

    def same(e: Eqn) -> Sequence[Atom] | None:
        if e.primitive.name != "name":
            return None
        if e.params["name"] != WHOLE_BATCH:
            named.setdefault(e.params["name"], []).extend(x for x in e.invars if is_var(x) and x in computed)
        return e.invars

    kept, outs = without(eqns, outs, same)
    return kept, outs, {name: set(values) for name, values in named.items()}


def names_in(eqns: Iterable[Eqn]) -> set[str]:
    """Returns the names of values in equations, and in those inside them."""
    return {e.params["name"] for e in all_equations(eqns) if e.primitive.name == "name"} - {WHOLE_BATCH}


def chosen(named: Mapping[str, Collection[Var]], names: Names, way: str) -> set[Var]:
    """Returns the values that go a way."""
    return {v for name, chosen_way in names if chosen_way == way for v in named.get(name, ())}


def check_known(names: Names, known: Collection[str], function: str) -> None:
    """Raises a `ValueError` for a name that nothing has."""
    for name, _ in names:
        if name not in known:
            raise ValueError(
                f"{function}: names: got {name!r}; expected one of {sorted(known)}, the names that the backward could "
                f"keep. Write jax.ad_checkpoint.checkpoint_name(x, {name!r}) where x is computed."
            )
