"""What users expect: splits, short texts of functions, a word about late shapes, and runs of `cavs train` in Python."""

import copy
import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import cli
from tests.small_run import train_run


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_split_deals_each_graph_to_one_part(seed: int | None) -> None:
    graphs = cavs.from_lengths(np.arange(1, 102), label=np.arange(101 * 51), graph_label=np.arange(101.0))
    parts = graphs.split([0.8, 0.1, 0.1], seed)
    numbers = [part.graph_label.astype(int).tolist() for part in parts if part.graph_label is not None]
    assert sorted(n for some in numbers for n in some) == [*range(101)]
    assert [len(part) for part in parts] == [81, 10, 10]
    assert ([n for some in numbers for n in some] == [*range(101)]) == (seed is None)
    for part, some in zip(parts, numbers, strict=True):
        assert part.equals(graphs[np.array(some)])
    assert all(a.equals(b) for a, b in zip(parts, graphs.split((0.8, 0.1, 0.1), seed), strict=True))


def test_wrong_fractions_are_refused() -> None:
    graphs = cavs.from_lengths([1, 2, 3])
    for wrong in ([0.8, 0.1], [80, 20], [1.5, -0.5], [], [np.nan, 1]):
        with pytest.raises(ValueError, match=r"Graphs\.split: fractions: got .*; expected positive numbers that add up to 1"):
            graphs.split(wrong)
    with pytest.raises(ValueError, match=r"which makes parts of \[3, 0\] graphs; expected at least one graph in each"):
        graphs.split([0.9, 0.1])
    for seed in (-1, 0.5, "a"):
        with pytest.raises(ValueError, match=rf"Graphs\.split: seed: got {seed!r}; expected an int >= 0 or None"):
            graphs.split([0.5, 0.5], seed)  # pyright: ignore[reportArgumentType]


def test_a_vertex_function_has_a_short_text() -> None:
    def cell(params, v):
        raise AssertionError

    assert repr(cavs.VertexFunction(cell, state={"c": (4,), "h": ()}, arity=2)) == (
        "VertexFunction(cell, state={'c': (4,), 'h': ()}, arity=2)"
    )
    assert repr(cavs.VertexFunction(cell, state=(np.int64(4),))) == "VertexFunction(cell, state=(4,), arity=0)"
    several = cavs.VertexFunction({"and": cell, "or": print}, state=jax.ShapeDtypeStruct((3, 2), jnp.bfloat16))
    assert repr(several) == "VertexFunction({'and': cell, 'or': print}, state=bfloat16[3, 2], arity=0)"
    program = cavs.vertex_programs.BinaryTreeLSTM(hidden=4, inputs=3)
    assert repr(program.vertex_function()) == "VertexFunction(BinaryTreeLSTM, state={'c': (4,), 'h': (4,)}, arity=2)"


def cell(params: Any, v: cavs.Vertex) -> None:
    h = params * (1 + v.gather_all(lambda h: h))
    v.scatter(h)
    v.push(h)


F = cavs.VertexFunction(cell, state=(2,))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda F: pickle.loads(pickle.dumps(F))])
def test_a_vertex_function_can_be_copied_and_pickled_after_it_ran(copied: Any) -> None:
    sched, params = cavs.schedule(cavs.from_parents([[1, -1]])), jnp.ones(2)
    want = cavs.run(F, params, sched)
    other = copied(F)
    np.testing.assert_array_equal(cavs.run(other, params, sched), want)


@pytest.mark.parametrize("steps", [None, 1])
def test_a_shape_that_first_occurs_in_a_late_epoch_is_told_once(steps: int | None, caplog: pytest.LogCaptureFixture) -> None:
    step = cavs.data.step(lambda w, sched: (w, cavs.run(F, w, sched).sum()))
    graphs = cavs.from_lengths(np.random.default_rng(4).geometric(0.1, 40))
    loader = cavs.data.Loader(graphs, 8, group="random", steps=steps)
    told, compiled, vertices = [], [], []
    for _ in range(14):
        for batches in loader:
            told.append(len(caplog.records))  # before the step compiles
            step(jnp.ones(2), batches)
            compiled.append(step.compilations)
            vertices.append(_schedule(batches).shape.vertices)
    late = compiled.index(max(compiled))
    assert max(compiled) > compiled[0] and late >= 2 * len(loader), "the data must bring a late shape"
    assert told[late] == told[-1] == 1
    message = caplog.records[0].getMessage()
    assert message.startswith("Loader: epoch ") and "write Loader(..., shapes=1)" in message
    assert f"8 graphs of {vertices[late]} vertices" in message and vertices[late] not in vertices[:late]


def _schedule(batch: Any) -> cavs.Schedule:
    return batch.tree if isinstance(batch, cavs.data.Batches) else batch


@pytest.mark.parametrize("options", [{"shapes": 1, "group": "random"}, {"seed": None}, {"group": "balanced"}])
def test_one_shape_and_epochs_that_are_alike_need_no_such_line(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    loader = cavs.data.Loader(cavs.from_lengths(np.random.default_rng(4).geometric(0.1, 42)), 8, steps=1, **options)
    shapes = [{sched.shape for sched in loader} for _ in range(14)]
    assert not caplog.records and all(some == shapes[0] for some in shapes)


def test_a_run_of_the_command_line_is_loaded_in_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = train_run(tmp_path)
    capsys.readouterr()
    assert cli.main(["predict", str(folder), str(tmp_path / "t.jsonl"), "--json", "--probabilities"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for place in (folder, str(folder), folder / "best.npz"):
        recipe, params = cavs.io.load_run(place)
    lines = [*recipe.predict(params, str(tmp_path / "t.jsonl"), False, True)]
    assert [cavs.data.json_of(line) for line in lines] == told
    assert [*recipe.predict(params, tmp_path / "t.jsonl", False, True)] == lines
    (tmp_path / "plain.txt").write_text("not bad")
    with pytest.raises(cavs.recipes.Mistake, match="FILE: .*plain.txt, line 1: got 'not bad'; expected a tree"):
        recipe.evaluate(params, tmp_path / "plain.txt")
    with np.load(folder / "best.npz") as file:
        assert any(np.array_equal(file[name], params["words"]) for name in file.files)
    with pytest.raises(
        cavs.recipes.Mistake,
        match=r"load_run: folder: got .*; expected the folder of a run, as `cavs train --out DIR` writes it",
    ):
        cavs.recipes.load_run(tmp_path)


def test_labels_and_words_that_are_missing_are_named() -> None:
    graphs = cavs.from_lengths([2], label=[0, 1])
    with pytest.raises(ValueError, match=r"with_labels: graphs: got graphs whose labels have no names; expected"):
        cavs.data.with_labels(graphs, ["a"])
    with pytest.raises(ValueError, match=r"with_labels: graphs: got graphs without labels"):
        cavs.data.with_labels(cavs.from_lengths([2]), ["a"])
    named = dataclasses.replace(graphs, label_names=("b", "a"))
    with pytest.raises(ValueError, match=r"with_labels: labels: got \['a'\]; expected all labels of the graphs, also \['b'\]"):
        cavs.data.with_labels(named, ["a"])
    assert cavs.data.with_labels(named, ["a", "c", "b"]).label.tolist() == [2, 0]
    assert cavs.data.with_labels(named, iter("ab")).label_names == ("a", "b")
    with pytest.raises(TypeError, match=r"vocabulary: special: got '<unk>'; expected a list of words. Write \['<unk>'\]"):
        cavs.data.vocabulary(graphs, "<unk>")
    for use in (cavs.data.words_of, cavs.data.sentences_of, cavs.data.phrases_of):
        with pytest.raises(ValueError, match="words_of: graphs: got graphs without words; expected vocab and input_id"):
            use(graphs)
    with pytest.raises(ValueError, match="vocabulary: graphs: got graphs without words"):
        cavs.data.vocabulary(graphs)
