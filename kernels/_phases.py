"""A level's program cut into phases: what a group of CTAs can run without meeting (VPPS section III, Cavs section 3.5).

A program is straight-line equations for ONE vertex (or one of its child edges), at levels STATIC, ROW and EDGE. CTA j of
a group owns units j*hb ... of every vector, so elementwise maths and sums over children are its own affair. A product (or
a sum over a vector) reads ALL units of its operand: what it reads must have been stored by every CTA of the group, and
the group must have met since. So the program is cut into phases: of one domain (rows or edges), and such that a
product's operand was gathered or stored before the phase.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core as jex

STATIC, ROW, EDGE = 0, 1, 2

# Primitives that act on each number alone and that Mosaic GPU lowers, or `_rewritten` writes with those that it does.
ELEMENTWISE = frozenset(
    """add sub mul div rem max min neg abs sign exp exp2 log log2 tanh logistic erf erfc sin cos sqrt rsqrt square
    integer_pow one_minus_square select_n clamp eq ne lt le gt ge and or not convert_element_type add_any pow expm1 log1p
    copy copy_p stop_gradient atan2 is_finite tan cbrt""".split()
)
STRUCTURE = frozenset("reshape squeeze expand_dims split slice concatenate broadcast_in_dim stack unstack pad".split())
ACROSS = frozenset("spread reduce_children_sum reduce_children_max".split())  # between rows and edges
REDUCTIONS = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min"}


class Unfit(ValueError):
    """Why a program cannot run in the persistent kernels; its text names the equation."""


# Where the value of an input of the program comes from. `tensor`, `index`, ... are names of arrays.


@dataclasses.dataclass(frozen=True)
class Rows:
    """Row `base + r` of a tensor (`base`: an index into the kernel's scalars); at an index, row `index[r]`; r: row or edge."""

    tensor: str
    index: str | None = None
    base: int | None = None
    part: int = 0  # block of the tensor's columns at which the value begins


@dataclasses.dataclass(frozen=True)
class Sum:
    """Row `base + r` of `direct`, where there is one, plus what a vertex's parents left for it.

    Each of `parts` is (tensor, index): row `index[r]` of the tensor, none where that is negative. With `first` and
    `count` a vertex may have several parents: rows `index[e]` for e from `first[r]`, `count[r]` of them.
    """

    direct: str | None
    base: int | None
    parts: tuple[tuple[str, str], ...]
    first: str | None = None
    count: str | None = None


@dataclasses.dataclass(frozen=True)
class Constant:
    """A STATIC array, the same for all rows."""

    tensor: str


Source = Rows | Sum | Constant


@dataclasses.dataclass(frozen=True)
class Tile:
    """Rows that one warpgroup holds as arrays of `shape` (rows, units): from `row`, none past `last`."""

    shape: tuple[int, int]
    row: Any
    last: Any


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """One packed weight: its tiles of 16 columns (for each CTA), the operands it multiplies, and where they leave sums.

    The last tile may be `half` a one, of 8 columns.
    """

    tiles: int
    half: bool
    operands: tuple[int, ...]
    columns: tuple[int, ...]  # first column of the partial sums, per operand
    offset: int  # in words within a CTA's packed weights


@dataclasses.dataclass(frozen=True)
class SourceSpec:
    """Rows that a product reads: the tensor's width, and the column at which its K numbers begin."""

    width: int
    column: int


@dataclasses.dataclass(frozen=True)
class ProductSpec:
    """All that `_mosaic.product` must know; see there."""

    rows: int
    splits: int
    chunk: int
    chunks: int
    sources: tuple[SourceSpec, ...]
    operands: tuple[tuple[int, ...], ...]
    weights: tuple[WeightSpec, ...]
    words: int
    resident: bool
    precision: str
    in_flight: int


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a value is stored: rows `base + r` of a tensor."""

    tensor: str
    base: int | None = None


@dataclasses.dataclass(eq=False)
class Product:
    """x @ W for each leading index of x: `operands[i]` are the sources (summed) of the i-th."""

    eqn: Any
    weight: Any  # variable of W
    axis: int  # of W that is contracted
    operands: list[list[Rows]]
    blocks: int  # of units in a result


@dataclasses.dataclass(eq=False)
class Phase:
    """Equations of one domain, the products among them, and what they store."""

    domain: int
    eqns: dict[Any, Any]  # variable -> the equation that makes it here
    products: list[Product]
    stores: dict[Any, list[Place]]
    meet: bool = False  # whether the group must meet before


@dataclasses.dataclass(eq=False)
class Level:
    """A program for one level, ready to be made into a kernel."""

    phases: list[Phase]
    sources: dict[Any, Source]  # of inputs and of values stored by earlier phases
    level: dict[Any, int]
    unit: int  # width of a unit vector
    scratch: dict[str, tuple[int, int, Any]]  # tensors for values between phases: name -> (domain, width, dtype)

    def tensors(self) -> set[str]:
        """Names of the tensors that some phase reads."""
        read = {x for p in self.phases for e in p.eqns.values() for x in e.invars if is_var(x)}
        read |= {v for p in self.phases for v in p.stores}
        found = {r.tensor for p in self.phases for q in p.products for o in q.operands for r in o}
        for x in read & set(self.sources):
            s = self.sources[x]
            if isinstance(s, Sum):
                found |= {n for n, _ in s.parts} | ({s.direct} if s.direct else set())
            else:
                found.add(s.tensor)
        return found


def is_var(x: Any) -> bool:
    """Whether `x` is a variable rather than a literal."""
    return not isinstance(x, jex.Literal)


def describe(eqn: Any) -> str:
    """An equation in few words, for messages."""
    shapes = ", ".join(x.aval.str_short() for x in eqn.invars)
    return f"{eqn.primitive.name}({shapes}) -> {', '.join(v.aval.str_short() for v in eqn.outvars)}"


def unit_width(program_vars: Sequence[Any]) -> int:
    """The greatest common divisor of the last axes of all values that are vectors."""
    widths = [v.aval.shape[-1] for v in program_vars if v.aval.shape and int(np.prod(v.aval.shape)) > 1]
    return int(np.gcd.reduce(widths)) if widths else 1


def blocks(aval: Any, unit: int) -> tuple[int, ...]:
    """A value's shape in blocks of one unit vector; () for a scalar of a row."""
    if int(np.prod(aval.shape)) == 1:
        return ()
    return (*aval.shape[:-1], aval.shape[-1] // unit)


def stored_dtype(aval: Any) -> Any:
    """How a value lies in memory: bools as int32."""
    return np.dtype(np.int32) if aval.dtype == np.bool_ else aval.dtype


def num_blocks(aval: Any, unit: int) -> int:
    """Unit vectors in a value; 0 for a scalar of a row."""
    shape = blocks(aval, unit)
    return int(np.prod(shape)) if shape else 0


def cut(
    eqns: Sequence[Any],
    level: dict[Any, int],
    sources: dict[Any, Source],
    outputs: dict[Any, list[Place]],
    written: frozenset[str],
) -> Level:
    """Cuts a program into phases.

    **Arguments:** the equations of ROW and EDGE level in order (STATIC ones are done before), every variable's level,
    the source of each input, the tensors that each output is stored in, and which tensors other CTAs of the group write
    in earlier levels. Raises [`Unfit`][] for what the kernels cannot do.
    """
    for e in eqns:
        _check_known(e)
    inside = [v for e in eqns for v in (*e.invars, *e.outvars) if is_var(v) and level.get(v, STATIC) != STATIC]
    unit = unit_width([*inside, *(v for v, s in sources.items() if not isinstance(s, Constant))])
    if unit % 16:
        raise Unfit(
            f"widths that are multiples of 16 are needed, but the greatest common divisor of the widths in F's recurrent "
            f"part is {unit}; choose a hidden size that is a multiple of 16"
        )
    for e in eqns:
        _check(e, level, unit)
    producer = {v: e for e in eqns for v in e.outvars}
    sources = dict(sources)
    made = _assign(eqns, level, sources, producer)
    count = max(made.values(), default=0) + 1
    domains = [next((level[v] for v, n in made.items() if n == i), ROW) for i in range(count)]
    phases = [Phase(domain, {}, [], {}) for domain in domains]

    def home(v: Any) -> int:
        """The phase in which a value is at hand first."""
        if v in made:
            return made[v]
        return next((i for i, d in enumerate(domains) if d == level[v]), 0)

    for v, names in outputs.items():
        phases[home(v)].stores.setdefault(v, []).extend(names)

    # From the last phase to the first: what its stores need. What another phase made is stored there, unless it is cheap
    # to compute again.
    scratch: dict[str, tuple[int, int, Any]] = {}
    for n in reversed(range(count)):
        phase = phases[n]
        todo, seen = list(phase.stores), set()

        def stored(x: Any) -> None:
            there = phases[home(x)].stores.setdefault(x, [])
            if not there:
                there.append(Place(f"scratch{len(scratch)}"))
                scratch[there[0].tensor] = (level[x], max(1, num_blocks(x.aval, unit)) * unit, stored_dtype(x.aval))
            sources[x] = Rows(there[0].tensor, base=there[0].base)

        while todo:
            x = todo.pop()
            if not is_var(x) or x in seen or level.get(x, STATIC) == STATIC or x not in producer:
                continue
            seen.add(x)
            e = producer[x]
            if made[x] != n and (level[x] != phase.domain or not _cheap(e, producer, made, level, phase.domain)):
                stored(x)
                continue
            for v in e.outvars:
                phase.eqns[v] = e
                seen.add(v)
            if _is_product(e, level):
                if _raw_sum(e.invars[0], producer, sources) is None:
                    stored(e.invars[0])
                if all(p.eqn is not e for p in phase.products):
                    phase.products.append(Product(e, e.invars[1], e.params["dimension_numbers"][0][1][0], [], 0))
            elif e.primitive.name in REDUCTIONS or e.primitive.name in ACROSS:
                y = e.invars[0]
                if is_var(y) and level.get(y, STATIC) != STATIC and (y not in sources or not _readable(e, y, level, sources)):
                    stored(y)
            else:
                todo += list(e.invars)

    fresh = set(written)
    for phase in phases:
        for p in phase.products:
            p.operands = _operands(p.eqn, producer, sources, unit)
            p.blocks = p.weight.aval.shape[1 - p.axis] // unit
        read = {r.tensor for p in phase.products for o in p.operands for r in o}
        whole = [sources[e.invars[0]] for e in phase.eqns.values() if e.primitive.name in REDUCTIONS]
        read |= {s.tensor for s in whole if isinstance(s, Rows)}
        if read & fresh:
            phase.meet = True
            fresh = set()
        fresh |= {place.tensor for places in phase.stores.values() for place in places}
    return Level([p for p in phases if p.stores], sources, level, unit, scratch)


def _assign(eqns: Sequence[Any], level: dict[Any, int], sources: dict[Any, Source], producer: dict[Any, Any]) -> dict[Any, int]:
    """The phase of every value that equations make, and of inputs that must be stored before a product reads them."""
    made: dict[Any, int] = {}
    left, n = list(eqns), 0
    unread = {x for e in eqns for x in e.invars if is_var(x) and x in sources and not _readable(e, x, level, sources)}
    for domain in sorted({level[x] for x in unread}):
        made |= {x: n for x in unread if level[x] == domain}
        n += 1
    while left:
        best = None
        for domain in (ROW, EDGE):
            got = _closure(left, level, domain, made, sources, producer)
            # Products last: a phase without any needs no meeting.
            key = (any(_needs_rows(e, level) for e in got), -len(got))
            if got and (best is None or key < best[0]):
                best = key, got
        if best is None:
            raise Unfit(f"no order of phases runs {describe(left[0])}")
        ids = {id(e) for e in best[1]}
        left = [e for e in left if id(e) not in ids]
        made |= {v: n for e in best[1] for v in e.outvars}
        n += 1
    return made


def _check_known(eqn: Any) -> None:
    name = eqn.primitive.name
    if name not in {*ELEMENTWISE, *STRUCTURE, *ACROSS, *REDUCTIONS, "dot_general"}:
        raise Unfit(f"{describe(eqn)}: the primitive {name} has no device code")
    for v in eqn.outvars:
        if v.aval.dtype not in (np.float32, np.int32, np.bool_):
            raise Unfit(f"{describe(eqn)}: float32 values are needed, with int32 and bool beside them")


def _check(eqn: Any, level: dict[Any, int], unit: int) -> None:
    name = eqn.primitive.name
    for v in (*eqn.outvars, *(x for x in eqn.invars if is_var(x) and level.get(x, STATIC) != STATIC)):
        size = int(np.prod(v.aval.shape))
        if size != 1 and (not v.aval.shape or v.aval.shape[-1] % unit):
            raise Unfit(f"{describe(eqn)}: a width that is no multiple of {unit}")
    if name in ELEMENTWISE or name in ACROSS:
        return
    if name in STRUCTURE:
        _check_structure(eqn, unit)
        return
    if name in REDUCTIONS:
        x = eqn.invars[0].aval
        if tuple(eqn.params["axes"]) != tuple(range(x.ndim)):
            raise Unfit(f"{describe(eqn)}: only a sum or maximum over all numbers of a vertex is possible")
        return
    if _is_product(eqn, level):
        weight = eqn.invars[1].aval
        if any(n % unit for n in weight.shape) or weight.dtype != np.float32:
            raise Unfit(f"{describe(eqn)}: the weight must be float32 and its sizes multiples of {unit}")
        return
    raise Unfit(f"{describe(eqn)}: only a vertex's value times a parameter matrix is possible")


def _check_structure(eqn: Any, unit: int) -> None:
    name, p = eqn.primitive.name, eqn.params
    last = len(eqn.invars[0].aval.shape) - 1
    bad = False
    if name == "slice":
        bad = p["strides"] is not None or bool(p["start_indices"][-1] % unit or p["limit_indices"][-1] % unit)
    elif name in ("unstack", "stack"):
        bad = p["axis"] == (last if name == "unstack" else last + 1)
    elif name == "pad":
        low, high, inside = zip(*p["padding_config"], strict=True)
        bad = any(inside) or min(*low, *high) < 0 or bool(low[-1] % unit or high[-1] % unit)
    elif name == "reshape":
        bad = p["dimensions"] is not None
    elif name == "broadcast_in_dim":
        x, out = eqn.invars[0].aval, eqn.outvars[0].aval
        if int(np.prod(x.shape)) > 1:
            bad = x.shape[-1] != out.shape[-1] or p["broadcast_dimensions"][-1] != out.ndim - 1
    if bad:
        raise Unfit(f"{describe(eqn)}: only whole blocks of {unit} numbers can be moved")


def _is_product(eqn: Any, level: dict[Any, int]) -> bool:
    if eqn.primitive.name != "dot_general":
        return False
    x, w = eqn.invars
    (lc, rc), (lb, _) = eqn.params["dimension_numbers"]
    static = not is_var(w) or level.get(w, STATIC) == STATIC
    rows = is_var(x) and level.get(x, STATIC) != STATIC
    del rc
    return rows and static and not lb and tuple(lc) == (len(x.aval.shape) - 1,) and len(w.aval.shape) == 2


def _needs_rows(eqn: Any, level: dict[Any, int]) -> bool:
    """Whether an equation reads all units of its operand."""
    return _is_product(eqn, level) or eqn.primitive.name in REDUCTIONS


def _readable(eqn: Any, x: Any, level: dict[Any, int], sources: dict[Any, Source]) -> bool:
    """Whether an equation can read the input `x` where it is; else `x` must be stored as rows first."""
    s, name = sources[x], eqn.primitive.name
    if isinstance(s, Constant):
        return True
    if name in REDUCTIONS or name == "spread":
        return isinstance(s, Rows) and s.index is None
    if _is_product(eqn, level) or name in ACROSS:
        return isinstance(s, Rows)
    return True


def _closure(
    eqns: Sequence[Any],
    level: dict[Any, int],
    domain: int,
    made: dict[Any, int],
    sources: dict[Any, Source],
    producer: dict[Any, Any],
) -> list[Any]:
    """Equations of `domain` that can run in the next phase."""
    here: set[Any] = set()
    got = []
    for e in eqns:
        if level[e.outvars[0]] != domain:
            continue
        read = [x for x in e.invars if is_var(x) and level.get(x, STATIC) != STATIC]
        name = e.primitive.name
        if _is_product(e, level):
            ok = _raw_sum(e.invars[0], producer, sources) is not None or e.invars[0] in made
        elif name in REDUCTIONS:
            ok = all(x in made or x in sources for x in read)
        elif name in ACROSS:
            ok = all(x in made or x in sources for x in read)
        else:
            ok = all(x in made or x in sources or x in here for x in read)
        if ok:
            got.append(e)
            here.update(e.outvars)
    return got


def _raw_sum(x: Any, producer: dict[Any, Any], sources: dict[Any, Source]) -> list[list[Rows]] | None:
    """For each leading index of `x` the gathered rows that it is the sum of; `None` where it is something else."""
    s = sources.get(x)
    if isinstance(s, Rows) and len(x.aval.shape) == 1 and x not in producer:
        return [[s]]
    e = producer.get(x)
    if e is None:
        return None
    parts = [_raw_sum(y, producer, sources) if is_var(y) else None for y in e.invars]
    if any(p is None for p in parts):
        return None
    if e.primitive.name in ("add", "add_any") and len(x.aval.shape) == 1:
        a, b = parts
        return [[*a[0], *b[0]]] if a and b and len(a[0]) + len(b[0]) <= 4 else None
    if e.primitive.name in ("stack", "concatenate") and len(x.aval.shape) == 2 and e.params.get("axis", 0) == 0:
        return [rows for p in parts if p for rows in p] if e.primitive.name == "stack" or e.params["dimension"] == 0 else None
    if e.primitive.name in ("broadcast_in_dim", "reshape", "expand_dims", "squeeze") and len(x.aval.shape) <= 2:
        return parts[0] if parts[0] and len(parts[0]) == int(np.prod(x.aval.shape[:-1])) else None
    return None


def _operands(eqn: Any, producer: dict[Any, Any], sources: dict[Any, Source], unit: int) -> list[list[Rows]]:
    """The rows that a product reads, for each leading index of its operand."""
    x = eqn.invars[0]
    raw = _raw_sum(x, producer, sources)
    if raw is not None:
        return raw
    s = sources[x]
    assert isinstance(s, Rows), "a product's operand is stored"
    lead, k = int(np.prod(x.aval.shape[:-1])), x.aval.shape[-1] // unit
    return [[dataclasses.replace(s, part=s.part + i * k)] for i in range(lead)]


def _cheap(eqn: Any, producer: dict[Any, Any], made: dict[Any, int], level: dict[Any, int], domain: int) -> bool:
    """Whether a value follows from inputs by elementwise maths of the same domain alone."""
    if eqn.primitive.name not in ELEMENTWISE and eqn.primitive.name not in STRUCTURE:
        return False
    read = [x for x in eqn.invars if is_var(x) and level.get(x, STATIC) != STATIC]
    return all(level[x] == domain and (x not in producer or _cheap(producer[x], producer, made, level, domain)) for x in read)
