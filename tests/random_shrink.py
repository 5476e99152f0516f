"""Shrinks a failing case while it fails in the same way: options, graphs, pushes, statements, states."""

import copy
import dataclasses
import time
from collections.abc import Callable, Iterator

from tests.per_vertex import Graph
from tests.random_cases import Case, Options
from tests.random_programs import Block, Program, blocks_of, renamed, without_unread


def shrunk(case: Case, fails: Callable[[Case], bool], seconds: float = 120.0) -> Case:
    """Returns the smallest failing case found. Tries changes until none helps or the time is over."""
    end = time.time() + seconds
    changed = True
    while changed:
        changed = False
        for ways in (_options, _graphs, _pushes, _statements, _states):
            todo = ways(case)
            while time.time() < end:
                smaller = next(todo, None)
                if smaller is None:
                    break
                if fails(smaller):
                    case, changed, todo = smaller, True, ways(smaller)
    return case


def _options(case: Case) -> Iterator[Case]:
    plain = Options(engine=case.options.engine, float32=case.options.float32, precision=case.options.precision)
    for field in dataclasses.fields(Options):
        value = getattr(plain, field.name)
        if getattr(case.options, field.name) != value:
            yield dataclasses.replace(case, options=dataclasses.replace(case.options, **{field.name: value}))


def _graphs(case: Case) -> Iterator[Case]:
    """Yields cases without half of the graphs, one graph, an unread vertex, or an edge."""
    counts = len(case.graphs)
    if counts > 2:
        yield _with_graphs(case, list(range(counts // 2)))
        yield _with_graphs(case, list(range(counts // 2, counts)))
    if counts > 1:
        for i in range(counts):
            yield _with_graphs(case, [j for j in range(counts) if j != i])
    for g, graph in enumerate(case.graphs):
        read = {child for children in graph for child in children}
        base = sum(map(len, case.graphs[:g]))
        if len(graph) > 1:
            for r in range(len(graph)):
                if r not in read:
                    fewer = [[c - (c > r) for c in children] for i, children in enumerate(graph) if i != r]
                    kinds = case.kinds[: base + r] + case.kinds[base + r + 1 :]
                    yield dataclasses.replace(case, graphs=_replaced(case.graphs, g, fewer), kinds=kinds)
        for r, children in enumerate(graph):
            for k in range(len(children)):
                fewer = _replaced(graph, r, children[:k] + children[k + 1 :])
                yield dataclasses.replace(case, graphs=_replaced(case.graphs, g, fewer))


def _with_graphs(case: Case, keep: list[int]) -> Case:
    starts = [sum(map(len, case.graphs[:i])) for i in range(len(case.graphs))]
    kinds = [k for i in keep for k in case.kinds[starts[i] : starts[i] + len(case.graphs[i])]]
    return dataclasses.replace(case, graphs=[case.graphs[i] for i in keep], kinds=kinds)


def _replaced(items: list[Graph] | Graph, index: int, item: object) -> list:
    return [item if i == index else old for i, old in enumerate(items)]


def _changed(case: Case, program: Program) -> Case:
    return dataclasses.replace(case, program=without_unread(program))


def _pushes(case: Case) -> Iterator[Case]:
    """Yields cases with a single unnamed push, or a single kind of vertices."""
    count, program = len(case.program.states), case.program
    if len(program.bodies) > 1:
        for body in program.bodies.values():
            one = program.copy()
            one.bodies = {None: copy.deepcopy(body)}
            yield dataclasses.replace(_changed(case, one), kinds=[None] * len(case.kinds))
    pushed = len(next(iter(program.bodies.values())).results) - count
    if pushed > 1 or program.pushes != ["{0}"]:
        for i in range(pushed):
            one = program.copy()
            one.pushes = ["{0}"]
            for body in one.bodies.values():
                body.results = [*body.results[:count], body.results[count + i]]
            yield _changed(case, one)


def _statements(case: Case) -> Iterator[Case]:
    """Last statements first: what reads one reads another of its type, or zeros, or one that it was made of; or a function
    within it does nothing."""
    places = [(b, s) for b, block in enumerate(blocks_of(case.program)) for s in range(len(block.stmts))]
    for b, s in sorted(places, reverse=True):
        block = list(blocks_of(case.program))[b]
        stmt = block.stmts[s]
        if stmt.var.kind == "k" or stmt.var.kind == "t":
            continue
        same = [a for a in _readable(case.program, b, s) if (a.shape, a.kind) == (stmt.var.shape, stmt.var.kind)]
        own = [a for a in same if a.name in stmt.args]
        for other in own + [a for a in same[:2] if a not in own]:
            smaller = case.program.copy()
            where = list(blocks_of(smaller))[b]
            del where.stmts[s]
            for body in smaller.bodies.values():
                renamed(body, stmt.var.name, other.name)
            yield _changed(case, smaller)
        plain = {"f": "jnp.full({}, 0.5, D)", "i": "jnp.full({}, 1, jnp.int32)", "b": "jnp.full({}, True)"}.get(stmt.var.kind)
        if plain is not None and stmt.template not in (text := plain.format(stmt.var.shape), "v.pull()"):
            if stmt.args or stmt.blocks or not stmt.template.startswith(("v.pull", 'p["', "jnp.full")):
                smaller = case.program.copy()
                where = list(blocks_of(smaller))[b].stmts[s]
                where.template, where.args, where.blocks = text, [], []
                yield _changed(case, smaller)


def _readable(program: Program, b: int, s: int) -> list:
    """The variables made before a statement in its own block or in the body around it, latest last."""
    target = list(blocks_of(program))[b]

    def path(block: Block) -> list | None:
        if block is target:
            return [stmt.var for stmt in block.stmts[:s]]
        for i, stmt in enumerate(block.stmts):
            for inner in stmt.blocks:
                found = path(inner)
                if found is not None:
                    return [x.var for x in block.stmts[:i]] + found
        return None

    for body in program.bodies.values():
        found = path(body)
        if found is not None:
            return found[::-1]
    return []


def _states(case: Case) -> Iterator[Case]:
    """Yields cases without a state leaf that no statement reads."""
    names = list(case.program.states)
    if len(names) < 2:
        return
    for i, name in enumerate(names):
        read = any(f'["{name}"]' in stmt.template for block in blocks_of(case.program) for stmt in block.stmts)
        if not read:
            smaller = case.program.copy()
            del smaller.states[name]
            for body in smaller.bodies.values():
                del body.results[i]
            yield _changed(case, smaller)
