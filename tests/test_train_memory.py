"""`cavs train --memory`: the plan changes how a batch is computed, never what."""

import json

import jax
import numpy as np
import pytest

from cavs._memory.search import FASTEST, Choice
from cavs._train import batches, memory
from cavs._train.config import TrainError
from cavs._train.memory import TrainingStep, budget_of, part_feed, plan_memory, train_loader
from cavs._train.step import begin, build_step
from cavs._train.task import configure, find_task
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
    "classify": (trees, {"loss": "root"}, Choice(4, "window")),
    "lm": (sentences, {"min_count": 1}, Choice(2, "least")),
    "nmt": (pairs, {"min_count": 1}, Choice(2, "fast")),
    "regress": (numbers, {}, Choice(4, "fast")),
    "tag": (corpus, {"min_count": 3, "embedding_size": 4}, Choice(2, "window")),
}


def run_of(task, tmp_path, lengths=None, **others):
    write, more, choice = CASES[task]
    path = tmp_path / ("t.jsonl" if task == "regress" else "t.txt")
    train = write(path, 14) if lengths is None else write(path, 14, lengths)
    given = SMALL | more | others | {"task": task, "train": train, "dev": train}
    config, data = find_task(task).read(configure(given))
    return config, find_task(task).model(config, data), find_task(task), data, choice


@pytest.mark.parametrize("task", CASES)
def test_a_batch_in_parts_gives_the_same_losses_and_weights(task, tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "SHAPES", 1)
    config, model, task, data, choice = run_of(task, tmp_path)

    def after_steps(choice):
        loader = train_loader(part_feed(task, model, data.train, config.batch, choice), config, choice)
        step, state, found = build_step(model, config, 10, choice), begin(model, config, None)[1](), []
        for batch in loader:
            state, metrics = step(state, batch)
            found += np.asarray(metrics.values).tolist()
        return found, state.weights

    (want, weights), (got, others) = after_steps(FASTEST), after_steps(choice)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)
    start = begin(model, config, None)[1]().weights
    for a, b, before in zip(*map(jax.tree.leaves, (others, weights, start)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        assert before.size < 20 or np.abs(b - before).max() > 1e-4


def test_a_budget_chooses_parts_and_is_never_exceeded(tmp_path):
    config, model, task, data, _ = run_of("regress", tmp_path, lengths=(30, 60), hidden=16, batch=8)
    work = TrainingStep(config, model, task, data)
    budget = int(0.6 * work.measure(FASTEST))
    assert plan_memory(config, model, task, data) == (FASTEST, 32, "", {})

    half = plan_memory(config.replace({"memory": str(budget)}), model, task, data)
    assert 1 < half.choice.parts < 8 and "predicted" in half.table
    assert work.measure(half.choice) <= budget and half.compiler_options == {}
    least = plan_memory(config.replace({"memory": "min"}), model, task, data)
    assert least.choice.parts == 8 and least.evaluation < 32
    with pytest.raises(TrainError, match=r"--memory: got 20 KiB; expected at least .* Write --memory \d+KiB, or a smaller"):
        plan_memory(config.replace({"memory": "20KiB"}), model, task, data)
    assert budget_of(2048) == budget_of("2048") == budget_of("2KiB") == 2048 and budget_of(0.5) == budget_of("0.5")
    with pytest.raises(TrainError, match="--memory: got '2 cakes'; expected bytes such as 2GiB"):
        plan_memory(config.replace({"memory": "2 cakes"}), model, task, data)


def test_small_steps_on_a_gpu_with_a_budget_do_without_cublas(tmp_path, monkeypatch):
    config, model, task, data, _ = run_of("regress", tmp_path, lengths=(8, 9), batch=14, hidden=16)
    asked = []
    monkeypatch.setattr(memory, "compiler_options", lambda saving, predicted: {"of": (saving, predicted)})
    monkeypatch.setattr(TrainingStep, "measure", lambda self, choice, options: asked.append(options) or 1000)
    found = plan_memory(config.replace({"memory": "1GiB"}), model, task, data)
    assert asked == [found.compiler_options] and found.compiler_options["of"][0]
    assert plan_memory(config, model, task, data).compiler_options == {}


def test_without_a_budget_a_batch_that_does_not_fit_the_gpu_comes_in_parts(tmp_path, monkeypatch):
    config, model, task, data, _ = run_of("regress", tmp_path, lengths=(8, 9), batch=14, hidden=16)
    whole = TrainingStep(config, model, task, data).measure(FASTEST)
    monkeypatch.setattr(memory, "memory_of_gpu", lambda: 10**12)
    assert plan_memory(config, model, task, data).choice == FASTEST
    monkeypatch.setattr(memory, "memory_of_gpu", lambda: int(0.9 * whole))
    monkeypatch.setattr(memory, "_ENOUGH", 10**9)
    found = plan_memory(config, model, task, data)
    assert found.choice != FASTEST and "memory of a training step:" in found.table
