"""The scheduler in C++ returns the integers of the one in NumPy, also for arrays that contradict each other."""

import contextlib
import dataclasses
import functools
import gc
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

import cavs
from cavs._schedule import batches
from cavs._schedule.batches import CompiledBatch, Source, StackScheduler
from cavs._schedule.ladder import schedule_into
from cavs._schedule.memory import Recycled, aligned, pinned
from cavs._schedule.shape import Shape
from cavs._schedule.shape_choice import NoRoom, Options, bound, counts_of, few_shapes
from cavs._schedule.tasks import Cut
from cavs.kernels import schedule_library
from cavs.kernels._cpu.build import compiler
from tests.odd_graphs import BATCHES, WIDE, chain, from_children, joined, random_binary_tree, star, with_kinds
from tests.random_forests import random_forest
from tests.schedule_checks import assert_same, check, dags, options_for
from tests.slow import few

ODD = BATCHES | WIDE
OPTIONS: list[dict[str, Any]] = [
    {},
    {"exact": True},
    {"policy": "serial"},
    {"kinds": False},
    {"kinds": "mixed"},
    {"exact": True, "policy": "serial"},
    {"shapes": ()},
]

if schedule_library() is None and compiler() is None:
    pytest.skip("the system has no C++ compiler", allow_module_level=True)


@pytest.fixture(autouse=True)
def memory_holds_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules are written over numbers that are wrong everywhere."""

    def used(*dims: int) -> np.ndarray:
        found = aligned(*dims)
        found[...] = -12345
        return found

    monkeypatch.setattr(batches, "aligned", used)


def test_the_library_is_compiled() -> None:
    assert schedule_library() is not None, "run python -m cavs.kernels._cpu"


def in_numpy(function: Callable[[], Any]) -> Any:
    """What a function returns where the library was not compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "schedule_library", lambda: None)
        return function()


def with_fields(graphs: cavs.Graphs, seed: int) -> tuple[cavs.Graphs, tuple[str, ...]]:
    """The same graphs with words and labels, and some of their fields in some order."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, 9, (2, graphs.num_vertices)).astype(np.int32)
    graphs = dataclasses.replace(graphs, input_id=ids[0], label=ids[1])
    has = [name for name in ("input_id", "label", "kind") if getattr(graphs, name) is not None]
    return graphs, tuple(rng.permutation(has)[: rng.integers(len(has) + 1)].tolist())


def check_same(graphs: cavs.Graphs, **options: Any) -> None:
    for scripts in (False, True):
        scheduled = functools.partial(cavs.schedule, graphs, scripts=scripts, **options)
        one, other = scheduled(), in_numpy(scheduled)
        assert one.data.dtype == other.data.dtype == np.int32 and one.data.ctypes.data % 64 == other.data.ctypes.data % 64 == 0
        assert_same(one, other)


def check_same_stacks(graphs: cavs.Graphs, rng: np.random.Generator, size: int, **options: Any) -> None:
    """Batches in shapes chosen for a sample of them: each is the same in C++, also on several threads, in NumPy, and alone."""
    for scripts in (False, True):
        chosen = options_for(graphs, scripts=scripts, **options)
        some = [rng.permutation(len(graphs))[:size] for _ in range(3)]
        limits = [bound(counts_of(graphs, chosen.kinds)[1], size)]
        (shape,) = few_shapes([(graphs, chosen)], [some[:1]], 2, limits)[-1]
        stacked = functools.partial(stack, graphs, chosen, some, shape, 5)
        compiled, reference = stacked(), in_numpy(stacked)
        np.testing.assert_array_equal(compiled, reference)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batches, "PER_THREAD", 1)
            for threads in (2, 3):
                found = StackScheduler(graphs, chosen, threads).stack(some, shape, 5)
                np.testing.assert_array_equal(found, reference)
        assert compiled.shape[0] == 5 and not compiled[3:].any()
        for index, data in zip(some, compiled, strict=False):
            check(graphs[index], cavs.Schedule(data, shape))
            np.testing.assert_array_equal(stack(graphs, chosen, [index], shape)[0], data)


def stack(
    graphs: cavs.Graphs, options: Options, batches: list[np.ndarray], shape: Shape, room: int | None = None
) -> np.ndarray:
    return StackScheduler(graphs, options).stack(batches, shape, room)


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_odd_graphs(name: str, options: dict[str, Any]) -> None:
    graphs, fields = with_fields(ODD[name], len(name))
    order = np.random.default_rng(0).permutation(len(graphs))
    for some in (graphs, graphs[:0], graphs[::-1], graphs[order[: len(order) // 2 + 1]], graphs[np.append(order, order)]):
        check_same(some, fields=fields, **options)


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("options", [o for o in OPTIONS if not o.keys() & {"exact", "shapes"}], ids=str)
def test_odd_graphs_in_known_shapes(name: str, options: dict[str, Any]) -> None:
    graphs, fields = with_fields(ODD[name], len(name))
    rng = np.random.default_rng(1)
    for size in {1, max(1, len(graphs) - 1), len(graphs)}:
        check_same_stacks(graphs, rng, size, fields=fields, **options)


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(dags(), st.integers(0, 99), st.sampled_from(OPTIONS), st.booleans())
def test_random_graphs(graphs: cavs.Graphs, seed: int, options: dict[str, Any], named: bool) -> None:
    graphs, fields = with_fields(graphs if named else dataclasses.replace(graphs, kind_names=None), seed)
    check_same(graphs, fields=fields, **options)


@pytest.mark.parametrize("seed", few(range(12), 6))
def test_large_random_forests(seed: int) -> None:
    """Levels of hundreds of vertices, and fan-in of up to a hundred."""
    rng = np.random.default_rng(seed)
    forest = random_forest(rng, int(rng.choice([1, 3, 9, 100])), 900) or [[[]]]
    graphs = joined([*map(from_children, forest), *([chain(300), star(200)] if seed % 3 == 0 else [])])
    if kinds := seed % 4:
        graphs = with_kinds(graphs, tuple("abc"[:kinds]), seed)
    graphs, fields = with_fields(graphs, seed)
    for options in OPTIONS:
        check_same(graphs, fields=fields, **options)
        if not options.keys() & {"exact", "shapes"}:
            check_same_stacks(graphs, rng, max(1, len(graphs) // 2), fields=fields, **options)


def test_known_shapes_are_taken_again() -> None:
    graphs, rng = joined([random_binary_tree(leaves, leaves) for leaves in range(2, 40)]), np.random.default_rng(0)
    some = [rng.integers(0, len(graphs), 9) for _ in range(20)]

    def scheduled() -> tuple[list[Any], list[cavs.Schedule]]:
        known: list[Any] = []
        return known, [cavs.schedule(graphs[index], shapes=known, scripts=len(index) % 2 == 0) for index in some]

    (shapes, found), (same, others) = scheduled(), in_numpy(scheduled)
    assert shapes == same
    for one, other in zip(found, others, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"policy": "serial", "steps": 1},
        {"steps": 2},
        {"kinds": False, "group": "random", "last": "pad"},
        {"kinds": "mixed", "steps": 2},
        {"parts": 2, "last": "pad"},
        {"collate": lambda sample: (sample.sched, sample.sched.pad(sample.graphs.input_id, -1)), "steps": 3},
    ],
    ids=lambda options: "-".join(options) or "defaults",
)
@pytest.mark.parametrize("ahead", [0, 2])
def test_loaders(options: dict[str, Any], ahead: int) -> None:
    graphs = joined([random_binary_tree(int(n), seed=int(n)) for n in np.random.default_rng(0).integers(1, 90, 20)])
    graphs, _ = with_fields(with_kinds(graphs, ("a", "b")), 0)

    def epochs() -> list[Any]:
        loader = cavs.data.Loader(graphs, 6, ahead=ahead, **options)
        assert ("NumPy" in repr(loader)) != batches.compiled()
        return [batch for _ in range(2) for batch in loader]

    for one, other in zip(epochs(), in_numpy(epochs), strict=True):
        assert jax.tree.structure(one) == jax.tree.structure(other)
        for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(x, y)


NO_ROOM: dict[str, Callable[[Any], Any]] = {
    "graphs": lambda s: s._replace(graphs=s.graphs - 1),
    "leaves": lambda s: s._replace(leaves=(s.leaves[0] - 8, s.leaves[1])),
    "inner": lambda s: s._replace(inner=(s.inner[0], s.inner[1] - 8)),
    "edges": lambda s: s._replace(edges=(s.edges[0], s.edges[1] - 32)),
    "vertices": lambda s: s._replace(vertices=s.vertices - 24),
    "tasks": lambda s: s._replace(tasks=3),
    "forest": lambda s: s._replace(forest=True),
    "rooted": lambda s: s._replace(rooted=True),
    "children": lambda s: s._replace(classes=((16, 16),)),
    "arity": lambda s: s._replace(arity=2),
    "levels": lambda s: s._replace(levels=2),
}


@pytest.mark.parametrize("what", NO_ROOM)
def test_a_batch_without_room_is_refused(what: str) -> None:
    graphs = with_kinds(joined([ODD["wide below narrow"][1:], ODD["few"], random_binary_tree(9, seed=1)]), ("a", "b"))
    options = options_for(graphs)
    shape = cavs.schedule(graphs).shape
    exact = cavs.schedule(graphs, exact=True).shape
    shape = shape._replace(vertices=exact.vertices + 16, leaves=tuple(n + 7 for n in exact.leaves), inner=exact.inner)
    everything = np.arange(len(graphs))
    stack(graphs, options, [everything], shape)
    stacked = functools.partial(stack, graphs, options, [everything], NO_ROOM[what](shape))
    for run in (stacked, functools.partial(in_numpy, stacked)):
        with pytest.raises(NoRoom, match="do not fit the shape Shape"):
            run()


def test_a_layout_of_another_batch_is_refused() -> None:
    """No caller asks for these; the library would write out of bounds."""
    graphs, _ = with_fields(with_kinds(joined([chain(9), star(5)]), ("a", "b")), 0)
    shape = cavs.schedule(graphs, fields=("label",)).shape
    others = (
        options_for(graphs, fields=("label",), kinds=False),
        options_for(graphs, fields=()),
        options_for(graphs, fields=("label", "input_id")),
    )
    for options in others:
        with pytest.raises(NoRoom, match="do not fit the shape"):
            stack(graphs, options, [np.arange(2)], shape)
    batch = CompiledBatch(Source(graphs, 2, True, ("label",)))
    batch.cut(Cut(((16, 64),)))
    with pytest.raises(NoRoom, match="its shape is"):
        batch.write(shape)


ARRAYS = ("vertex_offsets", "child_offsets", "children", "height", "kind")


def corrupted(graphs: cavs.Graphs, rng: np.random.Generator) -> cavs.Graphs:
    """The same graphs with a few wrong integers in one of the arrays, or a wrong length."""
    name = rng.choice([name for name in ARRAYS if getattr(graphs, name) is not None])
    array = getattr(graphs, name).copy()
    if rng.random() < 0.1:
        array = array[: rng.integers(len(array) + 1)]
    else:
        odd = np.array([-1, 0, 1, 2, len(array), 2**31 - 1, -(2**31), rng.integers(0, 99)])
        array[rng.integers(0, len(array), rng.integers(1, 4))] = rng.choice(odd)
    return dataclasses.replace(graphs, **{str(name): array})


@pytest.mark.parametrize("seed", range(150))
def test_wrong_arrays_are_refused_or_harmless(seed: int) -> None:
    rng = np.random.default_rng(seed)
    whole, fields = with_fields(ODD[str(rng.choice(["three kinds", "forest of three kinds", "leaf and inner"]))], seed)
    options = options_for(whole, fields=fields, scripts=bool(seed % 2))
    everything = [np.arange(len(whole))]
    ((shape,),) = few_shapes([(whole, options)], [everything], 1)
    graphs = corrupted(whole, rng)
    for function in (
        functools.partial(cavs.schedule, graphs, fields=fields, scripts=options.scripts),
        functools.partial(stack, graphs, options, everything, shape),
    ):
        with contextlib.suppress(ValueError, IndexError):  # any other error, and a crash, fails
            function()


@pytest.mark.parametrize("seed", range(150))
def test_arrays_that_change_after_they_were_read_are_refused_or_harmless(seed: int) -> None:
    rng = np.random.default_rng(seed)
    name = str(rng.choice(["three kinds", "forest of three kinds", "leaf and inner", "binary", "pyramids"]))
    whole, fields = with_fields(ODD[name], seed)
    mine = dataclasses.replace(whole, **{a: getattr(whole, a).copy() for a in ARRAYS if getattr(whole, a) is not None})
    options = options_for(mine, fields=fields, scripts=bool(seed % 2))
    everything = [np.arange(len(whole))]
    ((shape,),) = few_shapes([(mine, options)], [everything], 1)
    scheduler, wrong = StackScheduler(mine, options), corrupted(whole, rng)
    scheduler.stack(everything, shape)[:] = 2**30  # the next stack lies in the same memory, which nothing may read unwritten
    for a in ARRAYS:
        if (array := getattr(mine, a)) is not None:
            array[: len(getattr(wrong, a))] = getattr(wrong, a)
    with contextlib.suppress(ValueError, NoRoom):  # any other error, and a crash, fails
        scheduler.stack(everything, shape)


@pytest.mark.parametrize("threads", [1, 2])
def test_graph_numbers_out_of_range_are_refused(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "PER_THREAD", 1)
    graphs = joined([chain(3), star(2)])
    ((shape,),) = few_shapes([(graphs, options_for(graphs))], [[np.array([0, 1])]], 1)
    for number in (2, -1, 2**62):
        with pytest.raises(IndexError, match="index: got a graph number out of range"):
            StackScheduler(graphs, options_for(graphs), threads).stack([np.array([0]), np.array([number])], shape)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_first_batch_without_room_is_named(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "PER_THREAD", 1)
    graphs = joined([chain(3), chain(2), chain(900), chain(901)])
    scheduler = StackScheduler(graphs, options_for(graphs), threads)
    with pytest.raises(NoRoom, match=r"the graphs \[2\] do not fit"):
        scheduler.stack([np.array([k]) for k in (0, 1, 2, 0, 3, 1)], cavs.schedule(graphs[:1]).shape._replace(graphs=1))


def test_arrays_that_are_not_contiguous_are_copied() -> None:
    graphs, _ = with_fields(joined([chain(5), star(4), random_binary_tree(9, seed=0)]), 0)
    assert graphs.label is not None
    strided = dataclasses.replace(
        graphs,
        children=graphs.children.astype(np.int64),
        height=np.repeat(graphs.height, 2)[::2],
        label=np.ascontiguousarray(graphs.label[::-1])[::-1],
    )
    scheduler = StackScheduler(strided, options_for(graphs, fields=("label",)))
    shape = cavs.schedule(graphs, fields=("label",)).shape
    del strided
    gc.collect()
    (data,) = scheduler.stack([np.arange(3)], shape)
    assert_same(cavs.Schedule(data, shape), cavs.schedule(graphs, fields=("label",)))


def test_memory_is_given_again_when_nothing_refers_to_it() -> None:
    graphs = joined([chain(3), star(3)])
    scheduler, shape = StackScheduler(graphs, options_for(graphs)), cavs.schedule(graphs).shape

    def stack() -> np.ndarray:
        return scheduler.stack([np.arange(2)], shape)

    part = stack()[:, 3:].reshape(-1)[1:]  # a view of views keeps it
    first, kept = part.__array_interface__["data"][0], part.copy()
    others = [stack(), stack()]
    assert not any(np.shares_memory(part, other) for other in others) and (part == kept).all()
    of_jax = jax.device_put(stack())
    del part
    gc.collect()
    again = stack()
    assert again.__array_interface__["data"][0] <= first < again.__array_interface__["data"][0] + again.nbytes
    assert (np.asarray(of_jax) == again).all() and (others[0] == again).all()


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_memory_is_not_reused_before_it_was_sent(device: str) -> None:
    graphs = joined([chain(n) for n in range(1, 200)])
    scheduler = StackScheduler(graphs, options_for(graphs), threads=4, for_gpu=True)
    shape, sent, places = cavs.schedule(graphs).shape, [], set()
    want = np.tile(np.asarray(cavs.schedule(graphs).data), (64, 1))
    for n in range(20):
        out = scheduler.stack([np.arange(199)] * 64, shape)
        out[0] = n
        places.add(out.__array_interface__["data"][0])
        sent.append(jax.device_put(out, jax.devices(device)[0]))
        del out
        if n % 4 == 0:
            jax.block_until_ready(sent)
    assert device == "cpu" or len(places) < 20  # a CPU reads in place
    assert all((np.asarray(x[1:]) == want[1:]).all() and (x[0] == n).all() for n, x in enumerate(sent))


ENDS = {
    "arrays that contradict each other": "refused(ValueError, Source, dataclasses.replace(graphs, height=graphs.height * 0))",
    "an array of another length": "refused(ValueError, Source, dataclasses.replace(graphs, height=graphs.height[:1]))",
    "no library": "batches.schedule_library = lambda: None; refused(AssertionError, Source, graphs); "
    "refused(AssertionError, CompiledBatch)",
    "copies": "refused(ValueError, copy.deepcopy); refused(ValueError, pickle.dumps); twice = copy.copy(source)",
    "the end of the interpreter, in a circle": "source.batch = CompiledBatch(source); source.itself = source",
}


def test_all_memory_of_the_library_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not by `__del__`, in which Python loses a Ctrl-C: 2 % of those that arrived in a loop over `cavs.schedule`."""
    library, calls = schedule_library(), Counter[str]()

    class Counted:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            return lambda *arguments: calls.update([name]) or getattr(library, name)(*arguments)

    monkeypatch.setattr(batches, "schedule_library", Counted)
    graphs = joined([chain(3), star(2)])
    shape = cavs.schedule(graphs).shape
    assert schedule_into(graphs, [shape._replace(tasks=0), shape]) is not None
    assert schedule_into(joined([graphs, chain(99)]), [shape]) is None
    for name in ("height", "children"):
        with pytest.raises(ValueError, match="contradict each other"):
            cavs.schedule(dataclasses.replace(graphs, **{name: getattr(graphs, name) + 9}))
    assert calls["cavs_close"] == calls["cavs_open"] == 3 and calls["cavs_forget"] == calls["cavs_read"] - 2 == 3
    scheduler = StackScheduler(graphs, options_for(graphs))
    gone = weakref.ref(scheduler)
    del scheduler
    assert gone() is None and calls["cavs_forget"] == 4 and not hasattr(CompiledBatch, "__del__")


@pytest.mark.parametrize("code", ENDS.values(), ids=ENDS)
def test_memory_is_freed_without_a_word(code: str) -> None:
    """An error in `__del__` is printed, and not raised."""
    prelude = """
import copy, dataclasses, pickle
import cavs
from cavs._schedule import batches
from cavs._schedule.batches import CompiledBatch, Source

graphs = cavs.from_lengths([3, 2])
source = Source(graphs, 1, True, ())

def refused(error, call, *arguments):
    try:
        call(*(arguments or (source,)), *(1, True, ()) * (call is Source))
    except error:
        return
    raise AssertionError(call)
"""
    done = subprocess.run([sys.executable, "-c", prelude + code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_memory_that_jax_has_yet_to_write_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    late = jax.numpy.zeros((5, 4), np.int32)
    assert pinned(5, 4).shape == (5, 4)
    monkeypatch.setattr(jax, "device_put", lambda x, where: late)
    assert pinned(5, 4).ctypes.data != late.unsafe_buffer_pointer()


def test_little_memory_is_kept_for_other_arrays() -> None:
    memory = Recycled()
    many = [memory.empty(3, 5) for _ in range(20)]
    del many
    gc.collect()
    assert len(memory._free) == 8
    small, large = memory.empty(2, 2), memory.empty(16)
    assert small.shape == (2, 2) and large.shape == (16,) and len(memory._free) == 6


def test_a_cut_knows_whether_tasks_have_room_for_their_edges() -> None:
    assert not Cut(((8, 16), (2, 4))).limited and not Cut(((2, 600),), serial=True).limited
    assert [of.cls for of in Cut(((16, 64), (2, 64), (2, 600))).limited] == [0, 1]
