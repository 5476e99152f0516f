"""Horizontal fusion: matrix products that share an operand become one product (Cavs 3.5)."""

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from cavs._function.domains import STATIC, Domains, domain_of, domains
from cavs._function.rewrite import retrace
from cavs._jaxpr.equations import Program, run_equations, values
from cavs._jaxpr.jaxprs import Env, Eqn, Var, is_var


class _RowProduct(NamedTuple):
    """A vector-matrix product of a row value and a static matrix."""

    eqn: Eqn
    x: Var
    weight: Var
    axis: int  # the weight's contracted axis
    free: int  # its other axis


# Products that share their operand, whose weights are put side by side; or, if `stacked`, products that share their weight,
# whose row operands are stacked.
_Group: TypeAlias = list[_RowProduct]


def fuse_products(program: Program, known: Domains) -> tuple[Program, list[str]]:
    """Fuses the products of a program.

    First, products that share their row operand become one, with the weights side by side (the gates of an LSTM). Then products
    that share their weight become one, with the row operands stacked (the forget gates of a Tree-LSTM).

    Returns the new program, and a description of each fused group.
    """
    notes: list[str] = []
    for stacked in (False, True):
        domain = domains(program.eqns, known)
        groups = _groups(program, domain, stacked)
        notes += [_note(group, stacked) for group in groups]
        if groups:
            biases = _common_biases(program, groups, domain) if stacked else {}
            program = _fused(program, groups, biases, domain, stacked)
    return program, notes


def _product(eqn: Eqn, domain: Domains) -> _RowProduct | None:
    """Returns an equation as a product, if it is a vector-matrix product with a static matrix."""
    if eqn.primitive.name != "dot_general":
        return None
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    a, b = eqn.invars
    if lb or rb or len(lc) != 1 or not is_var(a) or not is_var(b):
        return None
    if domain_of(a, domain) == STATIC:  # W @ x is x @ W^T
        (a, b), (lc, rc) = (b, a), (rc, lc)
    if domain_of(a, domain) == STATIC or domain_of(b, domain) != STATIC:
        return None
    if len(a.aval.shape) != 1 or len(b.aval.shape) != 2:
        return None
    return _RowProduct(eqn, a, b, rc[0], 1 - rc[0])


def _groups(program: Program, domain: Domains, stacked: bool) -> list[_Group]:
    """Returns the groups of at least two products that are fused."""
    groups: dict[Hashable, _Group] = {}
    weight_id, depth = _weight_ids(program), _product_depths(program, domain)
    for eqn in program.eqns:
        p = _product(eqn, domain)
        if p is not None:
            settings = (p.axis, domain.get(p.x), str(eqn.params["precision"]), str(eqn.params["preferred_element_type"]))
            dtypes = (p.x.aval.dtype, p.weight.aval.dtype)
            # Only products of equal depth: none of these depends on another, however many groups there are.
            weight = weight_id.get(p.weight, p.weight)
            shared = (weight, depth[eqn.outvars[0]]) if stacked else p.x
            groups.setdefault((shared, settings, dtypes, p.x.aval.shape), []).append(p)
    return [group for group in groups.values() if len(group) > 1]


def _note(group: _Group, stacked: bool) -> str:
    x, weight = group[0].x.aval.str_short(), group[0].weight.aval.str_short()
    if stacked:
        return f"{len(group)} products share their weight {weight}: one of {len(group)} rows a vertex"
    width = sum(p.weight.aval.shape[p.free] for p in group)
    return f"{len(group)} products share their operand {x}: one of width {width}"


def _fused(program: Program, groups: Sequence[_Group], biases: dict[int, list[Eqn]], domain: Domains, stacked: bool) -> Program:
    """Returns the program with each group as one product. `biases` is from `_common_biases`."""
    group_of = {id(p.eqn): group for group in groups for p in group}

    def body(env: Env) -> list[jax.Array]:
        pending = list(program.eqns)
        while pending:
            waiting = []
            for eqn in pending:
                if eqn.outvars and eqn.outvars[0] in env:
                    continue  # computed with its group
                group = group_of.get(id(eqn))
                adds = biases.get(id(group), ())
                operands = [x for p in group for x in p.eqn.invars] if group else list(eqn.invars)
                operands += [x for e in adds for x in e.invars if domain_of(x, domain) == STATIC]
                if any(is_var(x) and x not in env for x in operands):
                    waiting.append(eqn)
                elif group is None:
                    run_equations([eqn], env)
                else:
                    _run_group(group, stacked, adds, env)
            assert len(waiting) < len(pending), "fused products wait for each other"
            pending = waiting
        return values(program.outs, env)

    return retrace(program, body)


def _run_group(group: _Group, stacked: bool, adds: Sequence[Eqn], env: Env) -> None:
    """Evaluates a group as one product, then the additions `adds`. Adds the results of both to `env`."""
    eqn, a, b, axis, free = group[0]
    kwargs = {"precision": eqn.params["precision"], "preferred_element_type": eqn.params["preferred_element_type"]}
    if not stacked:
        weights = [env[p.weight] for p in group]
        wide = lax.concatenate(weights, free)
        z = lax.dot_general(env[a], wide, (((0,), (axis,)), ((), ())), **kwargs)
        parts = lax.split(z, [w.shape[free] for w in weights])
    else:
        rows = jnp.stack([env[p.x] for p in group])
        z = lax.dot_general(rows, env[b], (((1,), (axis,)), ((), ())), **kwargs)
        if adds:
            (bias,) = {x for x in adds[0].invars if is_var(x) and x is not eqn.outvars[0]}
            z = z + jnp.broadcast_to(env[bias], z.shape)
        parts = [lax.squeeze(part, (0,)) for part in lax.split(z, [1] * len(group))]
    for p, part in zip(group, parts, strict=True):
        env[p.eqn.outvars[0]] = part
    for add, part in zip(adds, parts, strict=False):
        env[add.outvars[0]] = part


def _common_biases(program: Program, groups: Iterable[_Group], domain: Domains) -> dict[int, list[Eqn]]:
    """Maps the id of each group of stacked products to the additions of one and the same static vector to each result.

    They are stacked, too, so that product and addition leave ONE cut cotangent for both parameters.
    """
    readers: dict[Var, list[Eqn]] = {}
    for eqn in program.eqns:
        for x in eqn.invars:
            if is_var(x):
                readers.setdefault(x, []).append(eqn)
    outs = {x for x in program.outs if is_var(x)}
    additions = {}
    for group in groups:
        adds, vectors = [], set()
        for p in group:
            (z,) = p.eqn.outvars
            uses = readers.get(z, [])
            if z in outs or len(uses) != 1 or uses[0].primitive.name != "add" or not all(is_var(x) for x in uses[0].invars):
                break
            (b,) = [x for x in uses[0].invars if x is not z] or [z]
            if domain_of(b, domain) != STATIC or b.aval.shape != z.aval.shape:
                break
            adds.append(uses[0])
            vectors.add(b)
        if len(adds) == len(group) and len(vectors) == 1:
            additions[id(group)] = adds
    return additions


def _weight_ids(program: Program) -> dict[Var, Hashable]:
    """Equal keys for static concatenations of the same weights, so that stacking finds weights that were put side by side."""
    ids: dict[Var, Hashable] = {}
    for eqn in program.eqns:
        if eqn.primitive.name == "concatenate":
            parts = tuple(ids.get(x, x) if is_var(x) else id(x) for x in eqn.invars)
            ids[eqn.outvars[0]] = ("concatenate", eqn.params["dimension"], parts)
    return ids


def _product_depths(program: Program, domain: Domains) -> dict[Var, int]:
    """Returns the largest number of products on a path to each variable."""
    depth: dict[Var, int] = {}
    for eqn in program.eqns:
        before = max((depth.get(x, 0) for x in eqn.invars if is_var(x)), default=0)
        depth |= dict.fromkeys(eqn.outvars, before + (_product(eqn, domain) is not None))
    return depth
