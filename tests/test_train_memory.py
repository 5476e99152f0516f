"""`cavs train --memory`: the plan changes how a batch is computed, never what."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import cavs
from cavs import cli
from cavs.recipes._command import find_recipe
from cavs.recipes._train import Run
from tests.slow import few
from tests.small_run import arrays_of
from tests.test_fit import sentences, trees
from tests.test_tagger_training import corpus

SMALL = {"hidden": 4, "batch": 4, "dropout": 0.5, "seed": 3, "optimizer": "sgd", "lr": 0.5}


def pairs(path, count):
    sentences(path, count)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(f"{line}\t{' '.join(reversed(line.split()))}" for line in lines))
    return str(path)


def numbers(path, count, lengths=(1, 9)):
    sizes = np.random.default_rng(0).integers(*lengths, count).tolist()
    chains = [{"children": [[], *([i] for i in range(n - 1))], "label": n / 9} for n in sizes]
    path.write_text("\n".join(map(json.dumps, chains)))
    return str(path)


CASES = {
    "classify": (trees, {"loss": "root"}, 4),
    "lm": (sentences, {"min_count": 1}, 2),
    "nmt": (pairs, {"min_count": 1}, 2),
    "regress": (numbers, {}, 4),
    "tag": (corpus, {"min_count": 3, "embedding_size": 4}, 2),
}


def run_of(task: str, tmp_path: Path, lengths: Any = None, **others: Any) -> Run:
    write, more, _ = CASES[task]
    path = tmp_path / ("t.jsonl" if task == "regress" else "t.txt")
    train = write(path, 14) if lengths is None else write(path, 14, lengths)
    kind = find_recipe(task)
    options = kind.Options(**SMALL | more | {"train": (train,), "dev": train} | others)
    data = kind.read(options)
    return Run(kind(options, data.facts), data)


@pytest.mark.parametrize("task", few(["classify", "nmt", "tag"], 1))
def test_a_batch_in_parts_gives_the_same_losses_and_weights(task, tmp_path, monkeypatch):
    parts = CASES[task][2]

    def after_steps(**how: Any) -> tuple[Any, Any]:
        if how:
            monkeypatch.setattr(cavs.memory, "fewest_parts", lambda *_: (parts, 0))
        run = run_of(task, tmp_path, max_steps=100, **how)
        state, found = run.initial(), []
        for batch in run.loader:
            state, sums = run.step(state, batch)
            found.append({name: float(x) for name, x in sums.items()})
        return found, (run.initial()[0], state[0])

    (want, (start, weights)), (got, (_, others)) = after_steps(), after_steps(memory="min")
    total = lambda found: {name: sum(of[name] for of in found) for name in found[0]}  # noqa: E731  (shapes order the batches)
    for name, x in total(want).items():
        np.testing.assert_allclose(total(got)[name], x, rtol=2e-4, atol=1e-4)
    for a, b, before in zip(*map(jax.tree.leaves, (others, weights, start)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
        assert before.size < 20 or np.abs(b - before).max() > 1e-4


@pytest.mark.slow
def test_a_budget_chooses_parts_and_is_never_exceeded(tmp_path):
    whole = run_of("regress", tmp_path, lengths=(30, 60), hidden=16, batch=8)
    assert whole.memory is None
    bytes_of = {parts: whole._measure(parts) for parts in (1, 2, 4, 8)}
    assert bytes_of[1] > bytes_of[2] > bytes_of[4] > bytes_of[8]
    for parts, budget in bytes_of.items():
        run = run_of("regress", tmp_path, lengths=(30, 60), hidden=16, batch=8, memory=str(budget))
        assert run.memory == (parts, 8 // parts, budget)
    least = run_of("regress", tmp_path, lengths=(30, 60), hidden=16, batch=8, memory="min")
    assert least.memory is not None and least.memory[0] == 8
    with pytest.raises(cavs.memory.BudgetError, match=r"^--memory: got 20480 bytes; expected at least \d+KiB, for 8 parts"):
        run_of("regress", tmp_path, lengths=(30, 60), hidden=16, batch=8, memory="20KiB")
    with pytest.raises(cavs.recipes.Mistake, match="^--memory: got '2 cakes'; expected bytes"):
        run_of("regress", tmp_path, memory="2 cakes")
    with pytest.raises(cavs.recipes.Mistake, match="^--memory: got '0'; expected bytes"):
        run_of("regress", tmp_path, memory="0")


def test_the_command_prints_what_it_chose_and_dropout_is_that_of_the_whole_batch(tmp_path, capsys):
    path, runs = numbers(tmp_path / "t.jsonl", 16), []
    options = ["train", "--task", "regress", path, "--hidden", "4", "--batch", "4", "--epochs", "1", "--optimizer", "sgd"]
    for name, more in (("whole", []), ("parts", ["--memory", "min"])):
        assert cli.main([*options, *more, "--dropout", "0.5", "--out", str(tmp_path / name)]) == 0
        runs.append(arrays_of(tmp_path / name))
    assert "memory of a training step: 4 parts of 1, " in capsys.readouterr().out
    for name, x in runs[0].items():
        np.testing.assert_allclose(runs[1][name], x, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("fixed, each", [(100, 1000), (0, 777), (5000, 1), (10, 10**6)])
def test_the_fewest_parts_that_fit_are_found_in_few_compilations(fixed, each):
    for curve in (1.0, 0.7):
        bytes_of = {n: int(fixed + each / n**curve) for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 48)}
        for budget in {*bytes_of.values(), *(x + 1 for x in bytes_of.values())}:
            measured: list[int] = []
            measure = lambda n: measured.append(n) or bytes_of[n]  # noqa: B023, E731
            found, needed = cavs.memory.fewest_parts(measure, 48, budget)
            assert needed == bytes_of[found] <= budget and len(measured) == len(set(measured)) <= 7
            assert found == 1 or all(bytes_of[n] > budget for n in bytes_of if n < found)
        least = -(-bytes_of[48] // 1024)
        with pytest.raises(
            cavs.memory.BudgetError, match=f"^--memory: got 0 bytes; expected at least {least}KiB, for 48 parts"
        ):
            cavs.memory.fewest_parts(bytes_of.__getitem__, 48, 0, "--memory")
