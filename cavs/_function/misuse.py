"""What can go wrong while F is traced, as errors that name the line of F and say what to write."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from cavs._function.children import MSG_ESCAPED
from cavs._function.domains import STATIC, Domains, domain_of, domains
from cavs._function.raw_keys import key_impl
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.choices import is_choice
from cavs._jaxpr.equations import Program, bind
from cavs._jaxpr.jaxprs import Eqn, all_equations, opened
from cavs._jaxpr.source_lines import line_of, line_of_error, raised_by_jax

# What F does with a traced value that JAX refuses, by JAX's error, most special first. `{where}` is the line of F.
_REFUSED = [
    (
        jax.errors.TracerIntegerConversionError,
        "F uses a traced value as a Python integer{where}. F is traced once for all vertices, so v.num_children() has no value "
        "yet. For all children write v.gather_all(fn, reduce=...); for the first few, for k in range(arity): v.gather(k) with "
        "jnp.where(v.has_child(k), ...); to index an array, jnp.take(x, i, axis=0).",
    ),
    (
        jax.errors.TracerArrayConversionError,
        "F passes a traced value to NumPy{where}. F is traced once for all vertices, so write the same with jax.numpy, such as "
        "jnp.tanh for np.tanh.",
    ),
    (
        jax.errors.NonConcreteBooleanIndexError,
        "F selects with booleans{where}, so the shape of the result depends on values. Write jnp.where(condition, x, 0).",
    ),
    (
        jax.errors.ConcretizationTypeError,
        "F branches in Python on a traced value (or converts one to a Python number){where}. F is traced once for all "
        "vertices, so write jnp.where(condition, a, b) or jax.lax.cond for values of a vertex. Python may branch on "
        "v.is_leaf() and on plain settings.",
    ),
    (jax.errors.UnexpectedTracerError, MSG_ESCAPED),
]

_ABOUT_SHAPES = re.compile("shape|dimension|axis|axes|rank|broadcast|ndim|indices|index out of range|must be equal", re.I)

MSG_SHAPES = (
    "F: got shapes that do not fit{where}: {error} F is written for one vertex, without a batch axis; expected operations on "
    "{shapes} at {who}. Write F for these shapes: cavs.run evaluates it for all vertices at once."
)
MSG_CONTAINER = (
    "F uses a {what} as an array{where}: {error}. params and v.pull() have the structure of what run got, and v.gather(k) and "
    "the argument of v.gather_all(fn) that of state. {write}"
)
WRITE = {
    "dict": "Write v.pull('name') or v.gather(k)['name'] for one of the arrays.",
    "list": "Write jnp.asarray(rows) for nested lists of numbers, before the call of run.",
    "tuple": "Write v.pull()[0] or v.gather(k)[0] for one of the arrays.",
}
MSG_SIDE_EFFECTS = (
    "F has side effects ({}){}. F is traced once and its equations are moved and batched, so the effects would happen in no "
    "particular order, or never. To print, use cavs.interpret(F, params, graphs, inputs), in which print and breakpoint() "
    "work; otherwise push the value."
)
MSG_CHANGES = (
    "F changes params at {}{}; expected a function that only reads them. F is traced once, so all vertices and all calls of "
    "run would see the same change: a Flax NNX dropout that counts would use one mask for all. Write a new name for what F "
    "computes, and pass keys among the inputs: dropout(h, rngs=v.pull('key'))."
)
# By the generator of keys, what JAX computes for a batch of keys from the first of them.
_OF_FIRST_KEY: dict[str, tuple[str, ...]] = {
    "rbg": ("random_bits", "random_gamma"),
    "unsafe_rbg": ("random_bits", "random_gamma", "random_split", "random_fold_in"),
}
_VERTICES = 1 << 30  # how many vertices an equation is traced for: more than any axis in F has
MSG_GENERATOR = (
    "F draws random numbers from keys of the generator {impl!r}{where}. For a batch of such keys, JAX draws from the first. "
    "The numbers of a vertex would depend on other vertices, and differ where the backward pass draws them again. Write "
    "jax.random.key(seed, impl='threefry2x32') for the keys of vertices."
)


def role_name(kind: str | None, leaf: bool) -> str:
    """Returns how messages name a kind and role."""
    return f"a {'leaf' if leaf else 'vertex with children'}" + (f" of kind {kind!r}" if kind is not None else "")


def short(avals: Sequence[Any]) -> str:
    """Returns dtypes and shapes as text, such as "float32[8], int32[]"."""
    return ", ".join(f"{a.dtype}{list(a.shape)}" for a in avals)


def explained(error: Exception, who: str, inputs: PyTree, states: Sequence[jax.ShapeDtypeStruct]) -> Exception | None:
    """Returns the error to raise in place of one that F raised while it was traced, or `None` if that one should be raised.

    Args:
        error: what F raised. If `None` is returned, it gains a note with the line of F.
        who: the role for which F was traced, see `role_name`.
        inputs: one vertex's row of the inputs.
        states: shapes and dtypes of the leaves of the state.
    """
    where = line_of_error(error)
    for kind_of_error, text in _REFUSED:
        if isinstance(error, kind_of_error):
            return TypeError(text.format(where=where))
    for category in (IndexError, TypeError, ValueError):
        if isinstance(error, category) and raised_by_jax(error) and _ABOUT_SHAPES.search(str(error)):
            text = str(error).strip().splitlines()[0].rstrip(".") + "."
            rows = short([jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(inputs)])
            shapes = f"v.pull() of {rows} and states of {short(states)}" if rows else f"states of {short(states)}"
            return category(MSG_SHAPES.format(where=where, error=text, shapes=shapes, who=who))
    text = str(error).partition("\n")[0].rstrip(".")
    match = re.search("'dict'" if "operand" not in text else "'(dict|list|tuple)'", text)
    if isinstance(error, TypeError) and match:
        container = match[0].strip("'")
        return TypeError(MSG_CONTAINER.format(what=container, where=where, error=text, write=WRITE[container]))
    error.add_note(f"while F was traced for {who}{where}")
    return None


def call_pure(fn: Callable[..., None], params: PyTree, v: Any) -> None:
    """Calls F. Raises `TypeError` if it changes `params` in place."""
    before, again = _leaves_by_path(params), _leaves_by_path(params)  # some classes make a leaf anew each time
    fn(params, v)
    after = _leaves_by_path(params)
    kept = [path for path in before | after if before.get(path) is again.get(path)]
    changed = [path for path in kept if before.get(path) is not after.get(path)]
    if changed:
        raise TypeError(MSG_CHANGES.format(changed[0], defined(fn)))


def _leaves_by_path(tree: PyTree) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def check_outputs(v: Any, who: str, fn: Callable[..., None]) -> None:
    """Raises `ValueError` if F did not scatter or push; `v` is the `Vertex` that it was given."""
    if v.scattered is None:
        raise ValueError(
            f"F scatters nothing at {who}; write v.scatter(state) exactly once, also if no parent reads it{defined(fn)}."
        )
    if not v.pushed:
        raise ValueError(f"F pushes nothing at {who}, so run would return nothing; write v.push(value){defined(fn)}.")


def check_program(program: Program, known: Domains, fn: Callable[..., None]) -> None:
    """Refuses side effects (`TypeError`), and traced constants and keys that cannot be batched (`ValueError`), in F.

    `program`: F as it was traced. `known`: the domains of its inputs.
    """
    effects = {e.primitive.name: e for e in reversed(program.eqns) if e.effects}
    if effects:
        raise TypeError(MSG_SIDE_EFFECTS.format(", ".join(reversed(effects)), line_of([*effects.values()][-1])))
    for value in program.consts.values():
        if isinstance(value, Tracer):
            raise ValueError(
                f"F closes over a traced value of shape {value.shape}{defined(fn)}; F is traced once and kept, so it may only "
                "close over constants. Pass the value through params or inputs."
            )
    draws = {e: impl for e in program.eqns if (impl := _draws_from_first_key(e, least=0)) is not None}
    domain = domains(program.eqns, known) if draws else {}
    for e, impl in draws.items():
        if _draws_for_vertices(e, domain):
            raise ValueError(MSG_GENERATOR.format(impl=impl, where=line_of(e) or defined(fn)))


def _draws_for_vertices(eqn: Eqn, domain: Domains) -> bool:
    """Returns whether an equation, which runs for many vertices at once, would draw for all of them from the first key."""
    in_domains = [domain_of(x, domain) for x in eqn.invars]
    if not is_choice(eqn) or in_domains[0] == STATIC:
        return any(map(_draws_from_first_key, _of_vertices(eqn, [x == STATIC for x in in_domains])))
    bodies = [opened(branch)[0] for branch in eqn.params["branches"]]  # as `evaluate` runs them
    inner = ((e, domains(body.eqns, dict(zip(body.invars, in_domains[1:], strict=True)))) for body in bodies for e in body.eqns)
    return any(_draws_for_vertices(e, known) for e, known in inner)


def _of_vertices(eqn: Eqn, static: Sequence[bool]) -> Sequence[Eqn]:
    """Returns the equations that run one for many vertices. `static`: which operands are the same for all of them."""
    axes = tuple(None if is_static else 0 for is_static in static)
    shapes = [
        x.aval.shape if is_static else (_VERTICES, *x.aval.shape) for x, is_static in zip(eqn.invars, static, strict=True)
    ]
    batched = jax.vmap(lambda *args: bind(eqn, args), axes, axis_size=_VERTICES)
    avals = [jax.ShapeDtypeStruct(shape, x.aval.dtype) for shape, x in zip(shapes, eqn.invars, strict=True)]
    return opened(jax.make_jaxpr(batched)(*avals))[0].eqns


def _draws_from_first_key(eqn: Eqn, least: int = _VERTICES) -> str | None:
    """Returns the generator of which an equation, or one inside of it, would draw for a batch of keys from the first key.

    `least`: the size of the batch at least, 0 for one key.
    """
    keys = ((e.primitive.name, x.aval) for e in all_equations([eqn]) for x in e.invars if max(x.aval.shape, default=0) >= least)
    return next((impl for name, x in keys if (impl := key_impl(x)) and name in _OF_FIRST_KEY.get(impl, ())), None)


def defined(fn: Callable[..., None]) -> str:
    """Returns where a function is defined, as the end of a sentence; empty if this is unknown."""
    code = getattr(fn if hasattr(fn, "__code__") else type(fn).__call__, "__code__", None)
    return f" (F is defined in {code.co_filename}, line {code.co_firstlineno})" if code else ""
