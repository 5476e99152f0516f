"""What XLA removes before it assigns memory: equal equations, and results that nobody reads, also from loop to loop."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from cavs._function.equal_jaxprs import literal_key
from cavs._function.inline import inlined
from cavs._function.jaxprs import CALLS, Atom, Eqn, Jaxpr, Literal, Var, bodies_in, is_var, opened

CALLED = (*CALLS, "checkpoint", "remat2", "core_call", "platform_dependent")  # what XLA inlines


def simplified(eqns: Sequence[Eqn], outs: Sequence[Atom]) -> tuple[list[Eqn], list[Atom]]:
    """Returns equations without those that XLA removes, and what is read after the last of them."""
    merged, outs = _merged(eqns, outs)
    return _live(merged, outs), outs


def _merged(eqns: Sequence[Eqn], outs: Sequence[Atom]) -> tuple[list[Eqn], list[Atom]]:
    """The equations without those that repeat an earlier one, as XLA merges them."""
    first: dict[Any, Eqn] = {}
    rename: dict[Any, Any] = {}
    kept = []
    for e in eqns:
        e = e.replace(invars=[rename.get(x, x) if is_var(x) else x for x in e.invars])
        if (x := _same(e)) is not None:
            rename[e.outvars[0]] = x
            continue
        key = None
        if not e.effects and not bodies_in(e) and e.primitive.name != "optimization_barrier" and e.primitive.name != "empty":
            operands = tuple(x if is_var(x) else literal_key(x) for x in e.invars)
            key = e.primitive, operands, str(sorted(e.params.items(), key=lambda kv: kv[0]))
        same = first.setdefault(key, e) if key is not None else e
        if same is e:
            kept.append(e)
        else:
            rename.update(zip(e.outvars, same.outvars, strict=True))
    return kept, [rename.get(x, x) if is_var(x) else x for x in outs]


def _same(e: Eqn) -> Any:
    """The operand that an equation returns as it is: times the literal 1, as gradients of a loss are. `None` for others."""
    if e.primitive.name == "stop_gradient":
        return e.invars[0] if is_var(e.invars[0]) else None
    if e.primitive.name == "mul" and sum(map(is_var, e.invars)) == 1:
        (x,), (one,) = ([x for x in e.invars if is_var(x) == of] for of in (True, False))
        if x.aval.shape == e.outvars[0].aval.shape and np.all(cast(Literal, one).val == 1):
            return x
    return None


def _live(eqns: list[Eqn], outs: Iterable[Atom]) -> list[Eqn]:
    """The equations whose results are read, loops without values that only they themselves read."""
    read, kept, made = {x for x in outs if is_var(x)}, [], {v for e in eqns for v in e.outvars}
    for e in reversed(eqns):
        references = [x for x in e.invars if e.effects and is_var(x) and _is_reference(x)]
        if _has_others(e, references) or any(v in read for v in (*e.outvars, *references)) or not made.issuperset(references):
            if e.primitive.name in _LOOPS and not _observed(e):
                e = _LOOPS[e.primitive.name](e, read)
            kept.append(e)
            read.update(x for x in e.invars if is_var(x))
    return kept[::-1]


def _is_reference(x: Var) -> bool:
    """Whether a variable is a mutable array, such as a kernel's result."""
    return hasattr(x.aval, "inner_aval")


def _has_others(e: Eqn, references: list[Var]) -> bool:
    """Whether an equation has effects other than reading and writing these references."""
    return _observed(e) and not (references and all(type(effect).__name__ in _ON_REFERENCES for effect in e.effects))


def _observed(e: Eqn) -> bool:
    """Whether an equation has effects beyond those on references that begin and end inside of it."""
    return any(type(effect).__name__ != "InternalMutableArrayEffect" for effect in e.effects)


def _without_dead_values(loop: Eqn, read: set[Any]) -> Eqn:
    """A loop without the values that only their own next values depend on, and without constants that nobody reads."""
    body = _simplified_body(opened(loop.params["body_jaxpr"])[0])
    cond, _ = opened(loop.params["cond_jaxpr"])
    count, in_cond, consts = len(loop.outvars), loop.params["cond_nconsts"], loop.params["body_nconsts"]
    inside = body.invars[consts:]
    tested = _read_by(cond, cond.outvars)
    live = {i for i, v in enumerate(loop.outvars) if v in read or cond.invars[in_cond + i] in tested}
    needs, size = set(), -1
    while size != len(live):
        size, needs = len(live), _read_by(body, [body.outvars[i] for i in live])
        live |= {i for i, v in enumerate(inside) if v in needs}
    state = sorted(live)
    known = [i for i, v in enumerate(body.invars[:consts]) if v in needs]
    if (len(state), len(known)) == (count, consts):
        return loop
    invars = [*(body.invars[i] for i in known), *(inside[i] for i in state)]
    names = body.debug_info._replace(arg_names=None, result_paths=None)
    smaller = body.replace(invars=invars, outvars=[body.outvars[i] for i in state], debug_info=names)
    operands = [*range(in_cond), *(in_cond + i for i in known), *(in_cond + consts + i for i in state)]
    return loop.replace(
        invars=[loop.invars[i] for i in operands],
        outvars=[loop.outvars[i] for i in state],
        params=loop.params | {"body_jaxpr": smaller, "body_nconsts": len(known)},
    )


def _simplified_body(body: Jaxpr) -> Jaxpr:
    """The body of a loop, simplified: loops inside of it do not read values that they do not need."""
    eqns: list[Eqn] = []
    outs = inlined(body, {}, eqns, CALLED)
    eqns, outs = simplified(eqns, outs)
    return cast(Jaxpr, body.replace(eqns=eqns, outvars=outs))


def _scan_without_dead_values(loop: Eqn, read: set[Any]) -> Eqn:
    """The same for a loop of `lax.scan`."""
    body, _ = opened(loop.params["jaxpr"])
    invars = list(dict.fromkeys(x for x in loop.invars if is_var(x)))
    names = body.debug_info._replace(arg_names=None, result_paths=None)
    alone = body.replace(constvars=[], invars=invars, outvars=list(loop.outvars), eqns=[loop], debug_info=names)
    (found,) = dce_jaxpr(alone, [v in read for v in loop.outvars])[0].eqns
    return cast(Eqn, found)


_ON_REFERENCES = {"InternalMutableArrayEffect", "ReadEffect", "WriteEffect", "AccumEffect"}
_LOOPS = {"while": _without_dead_values, "scan": _scan_without_dead_values}


def _read_by(jaxpr: Jaxpr, outs: Iterable[Atom]) -> set[Var]:
    """The variables that results depend on."""
    needs = {x for x in outs if is_var(x)}
    for e in reversed(jaxpr.eqns):
        if e.effects or any(v in needs for v in e.outvars):
            needs.update(x for x in e.invars if is_var(x))
    return needs
