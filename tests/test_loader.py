"""`cavs.data.Loader`: every graph once an epoch, few shapes, exact resumption, and nothing that stays behind."""

import gc
import itertools
import json
import random
import re
import threading
from typing import Any

import jax
import numpy as np
import pytest

import cavs
from cavs._feed import thread
from cavs._feed.plan import EpochPlans, dispatches
from cavs._feed.sampler import epoch_batches
from cavs._feed.settings import Settings, steps_on_gpu
from cavs.kernels import H200, Target
from tests.odd_graphs import joined, random_binary_tree

RNG = np.random.default_rng(0)
SIZES = RNG.integers(1, 30, 50)
GRAPHS = joined([random_binary_tree(int(n), seed=i) for i, n in enumerate(SIZES)])
# The id of a vertex is the number of its graph, and so tells which graphs a batch has.
NUMBER = np.repeat(np.arange(50, dtype=np.int32), np.diff(GRAPHS.vertex_offsets))
GRAPHS = cavs.Graphs.build(
    np.diff(GRAPHS.vertex_offsets), np.diff(GRAPHS.child_offsets), GRAPHS.children, input_id=NUMBER, label=NUMBER % 5
)


def scheds(batches: Any) -> list[cavs.Schedule]:
    """The single schedules of what a loader yields."""
    tree, some = getattr(batches, "tree", batches), getattr(batches, "filled", None)
    rows = np.asarray(tree.data).reshape(-1, np.asarray(tree.data).shape[-1])
    return [cavs.Schedule(data, tree.shape) for data in rows[:some]]


def numbers(loader: Any) -> list[list[int]]:
    """The graphs of each batch of the next epoch."""
    return [np.unique(s.input_id[: s.num_vertices]).tolist() for batches in loader for s in scheds(batches)]


@pytest.mark.parametrize("group", ["balanced", "similar", "random"])
@pytest.mark.parametrize(("batch", "steps"), [(1, None), (7, 3), (8, 1), (64, None)])
def test_an_epoch_has_every_graph_once_in_at_most_three_shapes(group: str, batch: int, steps: int | None) -> None:
    loader = cavs.data.Loader(GRAPHS, batch, group=group, steps=steps)
    epochs, shapes = [], set()
    for epoch in range(5):
        assert loader.epoch == epoch
        found = [sched for batches in loader for sched in scheds(batches)]
        shapes |= {sched.shape for sched in found}
        epochs.append([np.unique(s.input_id[: s.num_vertices]).tolist() for s in found])
        assert sorted(sum(epochs[-1], [])) == list(range(50)) and len(found) == len(loader)
    assert len(shapes) <= 3
    assert batch == 64 or len({str(epoch) for epoch in epochs}) == 5  # each epoch is shuffled anew
    assert "50 graphs" in repr(loader) and "epoch 5, batch 0" in repr(loader)


def test_a_loader_uses_the_shapes_of_another() -> None:
    whole = cavs.data.Loader(GRAPHS, 5, seed=None, group="random", shapes=1)
    known = {sched.shape for batches in whole for sched in scheds(batches)}
    small = min(numbers(whole), key=lambda some: SIZES[some].sum())
    again = cavs.data.Loader(GRAPHS, iter([small]), shapes=whole)
    assert {sched.shape for batches in again for sched in scheds(batches)} == known
    alone = cavs.data.Loader(GRAPHS, iter([small]))
    assert {sched.shape for batches in alone for sched in scheds(batches)}.isdisjoint(known)
    with pytest.raises(ValueError, match="shapes: got a loader of other graphs, or with other fields"):
        cavs.data.Loader(GRAPHS, 5, shapes=whole, fields=("label",))


def test_schedules_are_those_of_the_scheduler() -> None:
    (sched,) = cavs.data.Loader(GRAPHS, [[3, 1, 2]], steps=1)
    plain = cavs.schedule(GRAPHS[[3, 1, 2]], fields=("input_id", "label"))
    assert sched.num_vertices == plain.num_vertices
    for name in ("row", "input_id", "label", "roots", "graph_end"):
        a, b = getattr(sched, name), getattr(plain, name)
        n = min(len(a), len(b), int(plain.num_vertices))
        np.testing.assert_array_equal(a[:n] - a[0], b[:n] - b[0])


def test_last_batches() -> None:
    short, drop, pad = (list(cavs.data.Loader(GRAPHS, 8, last=last, steps=1)) for last in ("short", "drop", "pad"))
    assert [s.shape.graphs for s in short] == [8] * 6 + [2] and [s.shape.graphs for s in drop] == [8] * 6
    assert [s.shape.graphs for s in pad] == [8] * 7
    sizes = np.diff(pad[-1].graph_end, prepend=0)
    label = pad[-1].label[: sizes.sum()]
    assert (label[sizes[:2].sum() :] == -1).all() and (label[: sizes[:2].sum()] >= 0).all()
    unlabelled = cavs.from_lengths([1, 2, 3])
    collated = [*cavs.data.Loader(GRAPHS, 8, last="pad", steps=1, collate=lambda sample: sample.sched)]
    np.testing.assert_array_equal(collated[-1].label, pad[-1].label)
    with pytest.raises(ValueError, match="last: got 'pad' for graphs without labels"):
        cavs.data.Loader(unlabelled, 2, last="pad")
    present = cavs.data.Loader(unlabelled, 2, last="pad", steps=1, collate=lambda sample: sample.present)
    assert np.concatenate(list(present)).tolist() == [True, True, True, False]


@pytest.mark.parametrize("options", [{"steps": 3}, {"steps": 1, "group": "random"}, {"steps": 2, "ahead": 2}])
def test_a_restored_loader_continues_bit_for_bit(options: dict) -> None:
    loader = cavs.data.Loader(GRAPHS, 7, **options)
    whole = [[np.asarray(s.data) for b in loader for s in scheds(b)] for _ in range(2)]
    for stop in (1, 2, 3):
        first = cavs.data.Loader(GRAPHS, 7, **options)
        list(first)
        seen = [np.asarray(s.data) for b in itertools.islice(first, stop) for s in scheds(b)]
        state = json.loads(json.dumps(first.state()))
        assert state["batch"] == len(seen)
        second = cavs.data.Loader(GRAPHS, 7, **options)
        second.restore(state)
        seen += [np.asarray(s.data) for b in second for s in scheds(b)]
        assert second.epoch == 2
        for a, b in zip(seen, whole[1], strict=True):
            np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="restore: state: got the position of a loader with other batches"):
        cavs.data.Loader(GRAPHS, 7, seed=1, **options).restore(state)


@pytest.mark.parametrize(
    "batches", [7, [np.arange(7), np.arange(5)] * 4, iter([np.arange(7), np.arange(5)] * 4)], ids=["size", "list", "iterator"]
)
def test_a_thread_prepares_batches(batches: Any) -> None:
    loader = cavs.data.Loader(GRAPHS, batches, ahead=2)
    loop = iter(loader)
    next(loop)
    assert any(thread.name == "cavs-prefetch" for thread in threading.enumerate())
    list(loop)
    assert loader.epoch == 1


def test_a_thread_and_a_checkpoint_plan_an_epoch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[int] = []
    plan = cavs.data.Loader._plan
    monkeypatch.setattr(
        cavs.data.Loader, "_plan", lambda self, epoch, batches: (plans.append(epoch), plan(self, epoch, batches))[1]
    )
    loader = cavs.data.Loader(GRAPHS, 7, ahead=2)
    for _ in range(4):
        list(loader)
        assert loader.state()["epoch"] == loader.epoch
    assert sorted(set(plans)) == sorted(plans) and set(plans) >= {0, 1, 2, 3, 4}


def test_a_loop_that_is_left_early_ends_its_epoch() -> None:
    loader = cavs.data.Loader(GRAPHS, 7, steps=2)
    next(iter(loader))
    assert (loader.epoch, loader.batch) == (0, 2)
    assert numbers(loader) == numbers(cavs.data.Loader(GRAPHS, epoch_batches_of(1), steps=1))
    assert loader.epoch == 2


def epoch_batches_of(epoch: int) -> list[np.ndarray]:
    grid = epoch_batches(np.diff(GRAPHS.vertex_offsets), 7, "balanced", 0, epoch)
    return [row[row >= 0] for row in grid]


def test_given_batches() -> None:
    given = [[1, 2], [3], slice(4, 6), [7, 7]]
    loader = cavs.data.Loader(GRAPHS, given, steps=1)
    assert numbers(loader) == numbers(loader) == [[1, 2], [3], [4, 5], [7]] and len(loader) == 4
    endless = cavs.data.Loader(GRAPHS, ([i % 50, i % 50] for i in itertools.count()), steps=2)
    firsts = [scheds(b)[0].input_id[0] for b in itertools.islice(endless, 300)]
    assert firsts == [2 * i % 50 for i in range(300)] or sorted(set(firsts)) == list(range(0, 50, 2))
    with pytest.raises(TypeError, match="come from an iterator"):
        len(endless)


def test_several_data_sets_and_collate() -> None:
    back = GRAPHS.reversed()
    extra = cavs.from_lengths([1, 2, 3])

    def collate(sample: cavs.data.Sample) -> dict[str, Any]:
        there, here, third = sample.sched  # type: ignore[misc]
        assert np.array_equal(there.input_id[: there.num_vertices], here.input_id[: here.num_vertices])
        assert [len(g) for g in sample.graphs] == [len(sample.numbers)] * 2 + [2]
        assert third.num_vertices == 4
        return {"scheds": sample.sched, "numbers": sample.numbers.astype(np.int32)}

    loader = cavs.data.Loader([GRAPHS, back, (extra, lambda some: np.array([0, 2]))], 7, collate=collate, steps=3)
    seen = [n for b in loader for n in np.asarray(b.tree["numbers"]).ravel().tolist()]
    assert sorted(seen) == list(range(50))
    assert len(set(map(str, loader._shapes.all))) <= 3
    pairs = next(iter(cavs.data.Loader((GRAPHS, back), 7, steps=1)))
    assert isinstance(pairs, tuple) and len(pairs) == 2


def test_labels_that_are_no_ids_are_left_to_collate() -> None:
    graphs = cavs.from_lengths([2, 1, 2], label=np.arange(5) / 2, graph_label=np.arange(3.0))

    def collate(sample: cavs.data.Sample) -> Any:
        assert isinstance(sample.graphs, cavs.Graphs) and isinstance(sample.sched, cavs.Schedule)
        return sample.sched, sample.sched.pad(sample.graphs.label, np.nan), sample.graphs.graph_label

    for sched, label, of_graph in cavs.data.Loader(graphs, 1, steps=1, collate=collate):
        assert sched.shape.fields == () and np.nanmean(label) in (0.25, 1, 1.75) and of_graph.shape == (1,)


def test_the_graphs_of_a_sample_are_selected_when_they_are_read() -> None:
    samples: list[cavs.data.Sample] = []

    def collate(sample: cavs.data.Sample) -> Any:
        samples.append(sample)
        return sample.sched

    assert len([*cavs.data.Loader(GRAPHS, 7, steps=1, collate=collate)]) == len(samples) == 8
    assert not any("graphs" in vars(sample) for sample in samples)
    assert all(sample.graphs.equals(GRAPHS[sample.numbers]) for sample in samples)


def test_dispatches_have_every_batch_once() -> None:
    found = dispatches([0, 1, 0, 0, 1, 0, 2], 2)
    assert [some.tolist() for some in found] == [[0, 2], [1, 4], [3, 5], [6]]
    assert dispatches([], 4) == []
    together = dispatches([0, 1, 0, 0, 1, 0, 2], 2, partial=True)
    assert [some.tolist() for some in together] == [[0, 2], [1, 4], [3, 5], [6]]
    assert [some.tolist() for some in dispatches([0] * 5, 3, partial=True)] == [[0, 1, 2], [3, 4]]


def test_small_batches_come_in_stacks_and_large_ones_alone() -> None:
    small, alone = cavs.data.Loader(GRAPHS, 7), cavs.data.Loader(cavs.from_lengths([40_000] * 3), 1)
    assert (small.steps, alone.steps, cavs.data.Loader(GRAPHS, 7, parts=7, last="drop").steps) == (8, 1, 1)
    assert [len(batches) for batches in cavs.data.Loader(GRAPHS, [[1, 2]] * 11)] == [8, 3]


def test_steps_of_a_dispatch_on_a_gpu_leave_few_batches_over() -> None:
    alike = cavs.data.Loader(GRAPHS, 7, seed=None)._settings

    def steps(of_shape: list[int], vertices: float = 1200, batch: int = 64, settings: Settings = alike) -> int:
        return steps_on_gpu(settings, vertices, batch, np.array(of_shape))

    assert (steps([133]), steps([132, 1]), steps([1024]), steps([7])) == (44, 44, 64, 7)
    assert (steps([1024], batch=1), steps([1024], vertices=2**15), steps([1024], vertices=2**20)) == (128, 32, 20)
    assert steps([1024], settings=alike._replace(collate=lambda sample: sample.sched)) == 20  # it may add large arrays
    # With a seed, later epochs have other numbers of batches of a shape: of 127 batches, 63 would be left over.
    assert (steps([128, 192]), steps([128, 192], settings=alike._replace(seed=0))) == (64, 60)


def test_on_a_gpu_the_first_epoch_decides_the_steps_of_a_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "here", staticmethod(lambda: H200))
    loader = cavs.data.Loader(GRAPHS, [[1, 2]] * 133, ahead=0)
    epoch = loader._planned(0)
    assert loader.steps == 132 and [len(batches) for batches in epoch.order] == [132, 1]
    loader._plans = EpochPlans()
    assert loader._planned(0).checksum == epoch.checksum  # planned for its steps, and then again


def test_on_a_gpu_full_stacks_have_a_program_of_their_own() -> None:
    loader = cavs.data.Loader(GRAPHS, 3, steps=4, shapes=1)
    here = [b.filled for b in loader]
    loader._delivery._settings = loader._settings._replace(target=H200)
    there, whole, rest = [b.filled for b in loader], None, 17 - 16
    assert here == [4, 4, 4, 4, rest] and there == [whole] * 4 + [rest]
    counts = [len(jax.tree.leaves(x)) - 1 for x in loader.examples()]
    assert counts == [0, 1], "both programs are compiled ahead"


@pytest.mark.parametrize(("steps", "text"), [(4, "[Batches(up to 4, arrays [(4, "), (1, "[Schedule(Shape(vertices=")])
def test_examples_of_shapes_print(steps: int, text: str) -> None:
    loader = cavs.data.Loader(GRAPHS, 3, steps=steps, shapes=1)
    examples = loader.examples()
    assert repr(examples).startswith(text)
    of_example, of_batch = (x.tree if steps > 1 else x for x in (examples[0], next(iter(loader))))
    assert [x.shape for x in jax.tree.leaves(of_example)] == [x.shape for x in jax.tree.leaves(of_batch)]


def test_batches_say_what_to_write() -> None:
    (batches,) = cavs.data.Loader(GRAPHS, [[1, 2]] * 4, steps=4)
    assert len(batches) == 4 and "Batches(4" in repr(batches)
    with pytest.raises(
        AttributeError, match="holds 4 batches for one dispatch. Decorate .* @cavs.data.step, without jax.jit, or .*steps=1"
    ):
        batches.input_id  # noqa: B018


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([1, 2], 4), TypeError, "Loader: graphs: got a int"),
        ((GRAPHS, 0), ValueError, "batches: got 0; expected an int >= 1"),
        ((GRAPHS, 2.5), TypeError, "batches: got 2.5; expected an int"),
        ((GRAPHS, "64"), TypeError, "batches: got '64'; expected an int"),
        (((GRAPHS, GRAPHS[:3]), 4), ValueError, r"data sets of \[3, 50\] graphs; .*write \(graphs, pick\)"),
        ((GRAPHS, 4, {"group": "sorted"}), ValueError, "group: got 'sorted'; expected one of 'balanced'"),
        ((GRAPHS, 4, {"last": "keep"}), ValueError, "last: got 'keep'; expected one of 'short'"),
        ((GRAPHS, 4, {"shapes": 0}), ValueError, "shapes: got 0; expected an int >= 1"),
        ((GRAPHS, 4, {"ahead": -1}), ValueError, "ahead: got -1; expected an int from 0 to 65536 or None"),
        ((GRAPHS, 4, {"ahead": 2**70}), ValueError, "ahead: got 1180591620717411303424; expected an int from 0 to 65536"),
        ((GRAPHS, 4, {"steps": 2**70}), ValueError, "steps: got 1180591620717411303424; expected an int from 1 to 65536"),
        ((GRAPHS, 4, {"workers": 0}), TypeError, "workers: got 0; expected no such argument. Write ahead=2 to prepare"),
        ((GRAPHS, None, {"batch_size": 64}), TypeError, "batch_size: got 64; .* Write batches=64"),
        ((GRAPHS, 4, {"drop_last": True}), TypeError, "drop_last: got True; .* Write last='drop'"),
        ((GRAPHS, 4, {"sede": 1}), TypeError, "sede: got 1; expected no such argument. Did you mean seed?"),
        ((GRAPHS, None), TypeError, "batches: got None; expected an int, the graphs of a batch"),
        (([GRAPHS[i] for i in range(5)], 4), ValueError, r"list of 5 data sets of one graph each; .* write cavs.Graphs.concat"),
        ((GRAPHS, 4, {"fields": ("kind",)}), ValueError, "fields: got 'kind'; expected fields that these graphs have"),
        ((GRAPHS, 4, {"mesh": 3}), ValueError, "mesh: got 3; expected a jax.sharding.Mesh of one axis"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple, error: type, text: str) -> None:
    options = arguments[2] if len(arguments) > 2 else {}
    with pytest.raises(error, match=text):
        cavs.data.Loader(*arguments[:2], **options)


def test_labels_of_no_root_are_confirmed() -> None:
    graphs = cavs.read_trees(["( (0 a) (1 b))", "( (1 c) (1 b))"])
    with pytest.raises(ValueError, match=r"but none of roots .* write fields=\('input_id', 'label'\) and cavs.data.mean"):
        cavs.data.Loader(graphs, 2)
    (sched,) = cavs.data.Loader(graphs, 2, fields=("input_id", "label"), steps=1, shuffle=False)
    assert sched.label[sched.roots].tolist() == [-1, -1]
    cavs.data.Loader(cavs.Graphs.concat([graphs, cavs.read_trees(["(1 a)"])]), 2)  # some roots have labels


def test_without_shuffling_epochs_have_the_order_of_the_data() -> None:
    for options in ({"shuffle": False}, {"seed": None}):
        loader = cavs.data.Loader(GRAPHS, 4, collate=lambda s: s.numbers, steps=1, **options)
        assert np.concatenate(list(loader)).tolist() == [*range(50)]
        assert ", in the order of the data\n" in repr(loader)


def threads() -> int:
    """The number of threads, once what nothing refers to has been freed."""
    gc.collect()
    return threading.active_count()


def test_abandoned_loops_leave_nothing_behind() -> None:
    without = threads()
    graphs = GRAPHS[:20]
    loader = cavs.data.Loader(graphs, 2, ahead=1, steps=1)
    for _ in range(3):
        list(loader)  # its thread begins the next epoch
        assert threads() == without + 1
    next(iter(loader))  # abandoned: ends the thread
    random.seed(0)
    assert threads() == without
    for _ in range(60):
        loop = iter(loader)
        try:
            for _ in range(random.randrange(4)):
                next(loop)
            if random.random() < 0.3:
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
        if random.random() < 0.5:
            loop.close()  # type: ignore[attr-defined]
    del loop
    assert threads() == without
    list(loader)
    del loader
    # If the thread held the last reference, as it does while it plans an epoch, it closes its own loop, and ends by itself.
    for ending in [one for one in threading.enumerate() if one.name == "cavs-prefetch"]:
        ending.join(60)
    assert threads() == without


def test_the_thread_of_a_finished_epoch_ends_before_python_does() -> None:
    """It sends batches to the device, which does not exist any more when daemon threads end."""
    loader = cavs.data.Loader(GRAPHS[:20], 2, ahead=1, steps=1)
    before = threading.active_count()
    list(loader)
    assert threading.active_count() == before + 1
    thread._close()
    assert threading.active_count() == before


def test_batches_are_dealt_to_parts_of_one_shape():
    graphs = cavs.from_lengths([3, 5, 2, 7, 4, 6, 1, 8])
    seen = []

    def collate(sample):
        seen.append(sample.numbers)
        return sample.sched

    loader = cavs.data.Loader(graphs, 4, parts=2, collate=collate, steps=1)
    for sched in loader:
        assert all(x.shape[0] == 2 for x in jax.tree.leaves(sched))
    parts = seen[-4:]
    assert sorted(np.concatenate(parts)) == [*range(8)] and [len(part) for part in parts] == [2] * 4
    assert "2 parts" in repr(loader)
    largest = jax.tree.leaves(loader.largest())
    assert [x.shape for x in largest] == [x.shape for x in jax.tree.leaves(sched)]


def test_the_largest_batch_is_one_that_fits_its_shape():
    """The first batch of an epoch may have another number of graphs, or more vertices in one of several data sets."""

    def rows(scheds):
        return sum(s.shape.vertices for s in jax.tree.leaves(scheds, is_leaf=lambda s: isinstance(s, cavs.Schedule)))

    lengths = np.random.default_rng(0).integers(1, 30, (2, 40))
    several = [cavs.from_lengths(some) for some in lengths]
    cases: list[tuple[Any, Any, dict[str, Any]]] = [
        (cavs.from_lengths([3, 3, 50]), [[0, 1], [2]], {}),
        (cavs.from_lengths([3, 3, 50]), [[2], [0, 1]], {}),
        (several, 4, {"group": "balanced", "parts": 4}),
        (several, 1, {"seed": 1, "shapes": 3}),
    ]
    for graphs, batches, options in cases:
        loader = cavs.data.Loader(graphs, batches, steps=1, **options)
        assert rows(loader.largest()) >= max(map(rows, loader))


@pytest.mark.parametrize(
    "batches, options, message",
    [
        (4, {"parts": 0}, "Loader: parts: got 0; expected an int >= 1 or None"),
        (4, {"parts": 3}, "Loader: batches: got 4 for 3 parts; expected a multiple of their number. Write batches=6."),
        (9, {"parts": 3}, "batches: got 9 with 8 graphs for 3 parts; expected a multiple of their number. Write batches=6, "),
        (6, {"parts": 3}, "Loader: last: got 'short' with a last batch of 2 graphs for 3 parts"),
        ([[0, 1, 2]], {"parts": 2}, "Loader: batches: got a batch of 3 graphs for 2 devices or parts"),
    ],
)
def test_batches_that_cannot_be_dealt_are_refused(batches, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        cavs.data.Loader(cavs.from_lengths([3, 5, 2, 7, 4, 6, 1, 8]), batches, **options)


@pytest.mark.parametrize("last", ["short", "drop", "pad"])
def test_without_a_seed_batches_are_in_the_order_of_the_data(last):
    graphs = cavs.from_lengths([5, 1, 9, 2, 7, 3, 4], label=np.arange(31))
    loader = cavs.data.Loader(graphs, 3, seed=None, last=last, steps=1, collate=lambda s: s.numbers[s.present])
    for _ in range(2):
        assert np.concatenate([*loader]).tolist() == list(range(6 if last == "drop" else 7))


@pytest.mark.parametrize("how", [{"ahead": 0}, {"ahead": 2}, {"ahead": 2, "steps": 2}], ids=str)
def test_collate_may_fill_the_same_array_again(how: dict[str, int]) -> None:
    graphs, rows = cavs.from_lengths([1] * 10), np.zeros(2, np.int32)

    def collate(sample: Any) -> Any:
        rows[:] = sample.numbers
        return sample.sched, rows

    loader = cavs.data.Loader(graphs, 2, collate=collate, shuffle=False, **{"steps": 1} | how)
    batches = [batch.tree if isinstance(batch, cavs.data.Batches) else batch for batch in loader]
    assert np.concatenate([np.ravel(x) for _, x in batches]).tolist() == [*range(10)]
