"""The schedule's picture and `cavs inspect`: any schedule and any graph can be drawn, and what is drawn is the schedule."""

import numpy as np
import pytest
from matplotlib.collections import LineCollection, PathCollection, PolyCollection
from matplotlib.figure import Figure

from cavs._debug.inspect import inspect
from cavs._graphs.converters import from_edges, from_lengths, from_parents
from cavs._graphs.draw import draw, layout, layout_of_batch
from cavs._graphs.graphs import Graphs
from cavs._schedule.plot import MAX_BARS, MAX_BATCH_VERTICES, plot_schedule
from cavs._schedule.schedule import task_table
from cavs._schedule.scheduler import schedule
from cavs.io import read_trees

PNG = b"\x89PNG\r\n\x1a\n"
DIAMONDS = from_edges(7, [(1, 0), (2, 0), (3, 1), (3, 2), (4, 3), (5, 3), (6, 4), (6, 5), (6, 0)])


def random_trees(num_graphs: int, size: int, seed: int = 0) -> Graphs:
    rng = np.random.default_rng(seed)
    return from_parents([[*(rng.integers(i + 1, size) for i in range(size - 1)), -1] for _ in range(num_graphs)])


def with_kinds() -> Graphs:
    return Graphs.build(
        [3, 3], [0, 0, 2] * 2, [0, 1] * 2, kind=[0, 1, 2] * 2, kind_names=("NOT", "AND", "never used"),
        input_id=[0, 1, -1] * 2, vocab=("$x_1$", "a very long word without any end"),
    )  # fmt: skip


CASES = {
    "one vertex": from_lengths([1]),
    "two levels": from_lengths([2]),
    "sequences": from_lengths([12, 9, 3, 30]),
    "5,000 levels": from_lengths([5000, 2]),
    "one wide level": from_parents([[300] * 300 + [-1]]),
    "trees": random_trees(20, 40),
    "forest": from_parents([[-1, -1, 0, 0], [-1]]),
    "DAG": DIAMONDS,
    "large DAG": from_edges(3000, [(v, v - d) for v in range(5, 3000) for d in (1, 2, 5)]),
    "kinds and words": with_kinds(),
}


@pytest.mark.parametrize("name", CASES)
def test_every_schedule_can_be_drawn(name, tmp_path):
    graphs = CASES[name]
    path = tmp_path / "picture.png"
    figure = schedule(graphs).plot(str(path), graphs)
    assert isinstance(figure, Figure) and len(figure.axes) == 2
    assert path.read_bytes().startswith(PNG) and path.stat().st_size > 5_000


def test_nothing_is_written_or_left_in_pyplot_without_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    figure = plot_schedule(schedule(DIAMONDS))
    assert len(figure.axes) == 1 and not list(tmp_path.iterdir())
    import matplotlib._pylab_helpers as helpers

    assert not helpers.Gcf.figs


@pytest.mark.parametrize("kinds", [True, False])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_tasks_hold_every_vertex_once_and_explain_the_waste(name, exact, kinds):
    graphs = CASES[name]
    sched = schedule(graphs, exact=exact, kinds=kinds)
    table = task_table(sched)
    np.testing.assert_array_equal(np.bincount(table["level"], table["size"]), np.bincount(graphs.height))
    assert (table["size"] <= table["width"]).all() and (np.diff(table["level"]) >= 0).all()
    assert sched.waste == pytest.approx(1 - table["size"].sum() / table["width"].sum())


@pytest.mark.parametrize("name", CASES)
def test_vertices_of_a_level_do_not_overlap(name):
    graph = CASES[name][0]
    x = layout(graph)
    assert np.isfinite(x).all()
    for level in range(int(graph.height.max()) + 1):
        assert (np.diff(np.sort(x[graph.height == level])) > 1 - 1e-6).all()


def drawn(graphs: Graphs) -> tuple[str, int]:
    """The title of the picture of the graphs, and the number of vertices that it shows."""
    axes = schedule(graphs).plot(graphs=graphs).axes[1]
    marks = [c for c in axes.collections if isinstance(c, PathCollection)]
    return axes.get_title(loc="left"), sum(len(c.get_offsets()) for c in marks)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["sequences", "trees", "forest"])
def test_lines_lead_from_vertices_to_their_children(name):
    graphs = CASES[name][:4]
    place = np.stack([layout_of_batch(graphs), graphs.height], 1)
    want = [
        (place[first + v], place[first + child])
        for graph, first in zip(graphs, graphs.vertex_offsets, strict=False)
        for v in range(graph.num_vertices)
        for child in graph.children[graph.child_offsets[v] : graph.child_offsets[v + 1]]
    ]
    axes = schedule(graphs).plot(graphs=graphs).axes[1]
    (lines,) = (c for c in axes.collections if isinstance(c, LineCollection))
    np.testing.assert_allclose([(line[0], line[-1]) for line in lines.get_segments()], want)


def test_the_picture_says_if_it_shows_a_part():
    title, vertices = drawn(random_trees(40, 40))
    assert vertices == MAX_BATCH_VERTICES and title.startswith("only the first 15 graphs of 40")
    title, vertices = drawn(from_lengths([5000, 2]))
    assert vertices == 5000 and title.startswith("only the first graph of 2")
    title, vertices = drawn(from_lengths([30_000]))
    assert vertices == 0 and title.startswith("the graph: 30,000 vertices")


def test_many_levels_are_drawn_as_few_bars_of_their_largest_numbers() -> None:
    graphs = from_lengths([10_001] + [7001] * 2 + [1] * 30)  # the first level is the widest
    axes = schedule(graphs).plot().axes[0]
    bars = [c for c in axes.collections if isinstance(c, PolyCollection)]
    boxes = np.array([path.vertices[:4] for path in bars[0].get_paths()])
    left, right, top = boxes[:, 0, 0], boxes[:, 2, 0], boxes[:, 1, 1]
    assert len(boxes) <= MAX_BARS and left[0] == -0.5 and right[-1] >= 10_000.5
    np.testing.assert_array_equal(left[1:], right[:-1])
    levels = np.bincount(graphs.height)
    want = [levels[int(np.ceil(a)) : int(np.ceil(b))].max() for a, b in zip(left, right, strict=True)]
    np.testing.assert_array_equal(top, want)
    assert "a bar is the widest of 6 levels; grey is" in axes.get_title(loc="left")


def test_a_traced_schedule_is_refused():
    import jax

    with pytest.raises(ValueError, match="plot it outside jax.jit"):
        jax.jit(lambda s: s.plot() and 0)(schedule(DIAMONDS))


def test_other_graphs_than_those_of_the_batch_are_refused():
    sched = schedule(from_lengths([2, 3]))
    with pytest.raises(ValueError, match="plot: graphs: got graphs of 4 vertices; expected those of the batch, of 5 vertices"):
        sched.plot(None, from_lengths([4]))
    with pytest.raises(TypeError, match=r"plot: path: got a Graphs; expected the path of a file, .*plot\(path, graphs\)"):
        sched.plot(from_lengths([2, 3]))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="plot: graphs: got a list; expected cavs.Graphs"):
        sched.plot(None, [2, 3])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="plot: got the schedule of no graphs; expected at least one"):
        schedule(from_lengths([])).plot()


def test_inspect_tells_the_file_and_writes_the_picture(capsys, tmp_path):
    inspect("cavs/data/reviews.dev.txt", 16, tmp_path / "dev.png")
    out = capsys.readouterr().out
    graphs = read_trees("cavs/data/reviews.dev.txt")
    for part in (
        "reviews.dev.txt", f"{len(graphs)}", f"{graphs.num_vertices:,}", "trees", "labels", "words in the vocabulary",
        "16 graphs", "padding", "batches", "dev.png",
    ):  # fmt: skip
        assert part in out
    assert (tmp_path / "dev.png").read_bytes().startswith(PNG)


def test_a_picture_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    """A disk that was full left half of a picture, in place of the old one."""

    def full(*_):
        raise OSError(28, "No space left on device")

    paths = [tmp_path / "a.png", tmp_path / "a.svg"]
    for path in paths:
        path.write_bytes(b"old")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        schedule(DIAMONDS).plot(paths[0])
    with pytest.raises(OSError, match="No space left"):
        draw(DIAMONDS, paths[1])
    assert sorted(tmp_path.iterdir()) == paths and {path.read_bytes() for path in paths} == {b"old"}


def test_inspect_prints_nothing_if_the_picture_cannot_be_written(tmp_path, capsys):
    for path, error in (("a.gif2", ValueError), ("nowhere/a.png", OSError)):
        with pytest.raises(error):
            inspect("cavs/data/reviews.dev.txt", 16, tmp_path / path)
    assert not capsys.readouterr().out and not [*tmp_path.iterdir()]


def test_inspect_refuses_an_empty_batch():
    with pytest.raises(ValueError, match="--batch: got 0; expected an integer >= 1"):
        inspect("cavs/data/reviews.dev.txt", 0)
