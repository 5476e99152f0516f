"""A training run of a recipe: data, step, loop, and what is left in its folder."""

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import cavs
from cavs.recipes import _report as report
from cavs.recipes._data import Data
from cavs.recipes._machine import mesh_of
from cavs.recipes._options import RESUMABLE, Mistake, RunOptions, flag
from cavs.recipes._recipe import Recipe, optimizer

EVALUATION_BATCHES = 4  # an evaluation batch has the size of this many training batches


def training_step(recipe: Recipe, rule: optax.GradientTransformation, parts: int) -> Callable[[Any, Any], tuple[Any, Any]]:
    """The step of one batch, not compiled: `step(state, batch)`, where the state is `(params, moments, steps done)`.

    Args:
        recipe: the model and its loss.
        rule: the optimiser.
        parts: the number of parts in which a batch comes; 1 for a batch without an axis of parts.
    """
    seed = recipe.options.seed

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, moments, count = state
        key = jax.random.fold_in(jax.random.key(seed + 1), count) if recipe.options.dropout else None

        def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
            return recipe.loss(params, batch, key)

        if parts == 1:
            (_, sums), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        else:
            (_, sums), grads = jax.value_and_grad(cavs.memory.sub_batched(loss, has_aux=True), has_aux=True)(params, [batch])
        terms = jnp.maximum(sums["count"], 1)  # the loss is a sum, and sums add up over parts and devices
        updates, moments = rule.update(jax.tree.map(lambda g: g / terms.astype(g.dtype), grads), moments, params)
        return (optax.apply_updates(params, updates), moments, count + 1), sums

    return step


class Run:
    """A run: the recipe, its loaders, and its compiled step."""

    def __init__(self, recipe: Recipe, data: Data):
        self.recipe, self.data, options = recipe, data, recipe.options
        self.mesh = mesh_of(options)
        self.like = jax.eval_shape(lambda: recipe.init(jax.random.key(0)))
        self.loader = self._loader(1)
        self.total = min(options.epochs * len(self.loader), options.max_steps or options.epochs * len(self.loader))
        self.rule = optimizer(options, self.total)
        self.memory = self._memory()
        parts = 1 if self.memory is None else self.memory[0]
        self.loader = self._loader(parts) if parts > 1 else self.loader
        self.step = cavs.data.step(training_step(recipe, self.rule, parts), tune=options.tune)
        self._evaluated: dict[str, cavs.data.Loader] = {}

    def _loader(self, parts: int) -> cavs.data.Loader:
        options = self.recipe.options
        # Evaluations every few steps, and a last step within an epoch, need dispatches of single steps.
        steps = 1 if options.save_every or options.max_steps or parts > 1 else None
        how: dict[str, Any] = {"parts": parts} if parts > 1 else {"mesh": self.mesh}
        return self.recipe.loader(self.data.parts["train"], options.batch, seed=options.seed, steps=steps, **how)

    def _memory(self) -> tuple[int, int, int] | None:
        """The number of parts that fits `--memory`, the samples of a part, and the bytes of a step."""
        memory, batch = self.recipe.options.memory, self.recipe.options.batch
        if memory == "none":
            return None
        try:
            fraction = re.fullmatch(r"0?\.\d+|1\.0*", memory)
            budget = cavs.memory.bytes_of(float(memory) if fraction else memory, "train", "--memory")
        except ValueError as error:
            raise Mistake(str(error)) from error
        parts, needed = cavs.memory.fewest_parts(self._measure, batch, budget or "min")
        return parts, batch // parts, needed

    def _measure(self, parts: int) -> int:
        """The bytes that XLA needs for a step: state, batches, and temporary memory. Compiles it."""
        loader, state = self._loader(parts), jax.eval_shape(self.initial)
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), loader.largest())
        step = cavs.data.step(training_step(self.recipe, self.rule, parts))
        found = step.lower(state, batch).compile().memory_analysis()
        if found is None:
            raise Mistake("--memory: the backend does not report the memory of a program. Omit it.")
        size = lambda tree: sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
        return found.temp_size_in_bytes + size(state) + loader.on_device * size(batch)

    def initial(self) -> Any:
        """The state before the first step, which depends on the seed."""
        vectors = self.data.vectors
        params = self.recipe.init(jax.random.key(self.recipe.options.seed), vectors)
        return params, self.rule.init(params), jnp.zeros((), jnp.int32)

    def evaluate(self, params: Any, part: str) -> dict[str, float]:
        """The summed metrics of a part of the data, without dropout."""
        if part not in self._evaluated:
            batch = EVALUATION_BATCHES * self.recipe.options.batch if self.memory is None else self.memory[1]
            how = {"seed": None, "shapes": 1, "steps": 1, "mesh": self.mesh}
            self._evaluated[part] = self.recipe.loader(self.data.parts[part], batch, **how)
        return self.recipe.held_out(params, self.data.parts[part], self._evaluated[part])


def train(kind: type[Recipe], options: RunOptions, out: str | None, resume: Path | None, command: str) -> int:
    """Trains a recipe, or resumes the run in the folder `resume`. Returns the exit code.

    Args:
        kind: the recipe.
        options: the options of the run.
        out: the folder of a new run; `None` creates one under `runs/`.
        resume: the folder of the run to resume.
        command: how the user starts a command, for messages.
    """
    started, messages = time.monotonic(), report.Messages(command)
    taken = f"--out: got {out}, which already contains a run; expected another folder. To continue, write --resume {out}."
    if resume is None and out is not None and (Path(out) / "model.json").exists():
        raise Mistake(taken)
    data = kind.read(options)
    recipe = kind(options, data.facts)
    run = Run(recipe, data)
    facts = {"task": kind.name, "cavs": cavs.__version__, "options": options.as_json()}
    facts |= {"facts": json.loads(json.dumps(data.facts))}
    if resume is not None and (before := cavs.data.read_run(resume))["facts"] != facts["facts"]:
        versions = f"{resume} was trained by cavs {before.get('cavs')}, this is cavs {facts['cavs']}"
        raise Mistake(f"--resume: {versions}; expected the same version and files.")
    stem = Path(options.train[0]).name.split(".")[0] if options.train else "reviews"
    shared = out or (f"runs/{stem}" if jax.process_count() > 1 else None)  # by all processes
    folder = resume or (Path(shared) if shared else cavs.data.new_folder(f"runs/{stem}"))
    limits = {"epochs": options.epochs, "steps": options.max_steps, "patience": options.patience, "every": options.save_every}
    files = [*filter(None, (*options.train, options.dev, options.test, getattr(options, "embeddings", None)))]
    keeper = cavs.data.Keeper(folder, run.loader, recipe.score, facts=facts, files=files, **limits)
    try:
        with keeper, _log(options, folder, run.loader) as (log, write):
            if resume is None and (folder / "model.json").exists():
                raise Mistake(taken)  # another run has started meanwhile
            state = keeper.restore(jax.jit(run.initial)())
            messages.introduce(recipe, run, keeper)
            with report.bar(keeper, run) as advance:
                for batches in keeper:
                    state, sums = run.step(state, batches)
                    messages.tuned(run)
                    log(sums)
                    due = keeper.add(state, sums)
                    advance()
                    if due:
                        held_out = run.evaluate(state[0], "dev")
                        best = keeper.score(state, held_out, best=state[0])
                        messages.evaluated(recipe, keeper.history[-1], best)
                        scores = {"held_out_loss": held_out["loss"] / held_out["count"], "score": recipe.score(held_out)}
                        write({"step": run.loader.seen, "epoch": keeper.history[-1]["epoch"], **scores})
            if keeper.stopped:
                messages.stopped(keeper, run)
                return 128 + keeper.stopped
            messages.finish(recipe, run, keeper, time.monotonic() - started)
            return 0
    except FloatingPointError as error:
        raise Mistake(f"{error} Try a smaller --lr or --clip.") from error
    except (OSError, MemoryError, jax.errors.JaxRuntimeError) as error:
        raise messages.failure(error, options, folder) from error


def tune(kind: type[Recipe], options: RunOptions) -> int:
    """Times layouts of the kernels of a training run, keeps the fastest, and prints all. Returns the exit code.

    Raises:
        Mistake: the kernels cannot run here, or not in this recipe.
    """
    data = kind.read(options)
    run = Run(kind(options, data.facts), data)
    try:
        found = run.step.tune(jax.eval_shape(run.initial), next(iter(run.loader)))
    except ValueError as error:
        if not str(error).startswith("Step.tune: "):
            raise
        raise Mistake(str(error).removeprefix("Step.tune: ")) from error
    print(*(launch.table() for launch in found), sep="\n")
    return 0


def saved(folder: Path, kind: type[Recipe], given: dict[str, Any]) -> RunOptions:
    """The options of the run in a folder, with those that `given` changes.

    Raises:
        Mistake: an option cannot change.
    """
    before = kind.Options.from_json(cavs.data.read_run(folder)["options"], f"{folder}/model.json")
    given = absolute(given)
    wrong = [flag(name) for name, value in given.items() if name not in RESUMABLE and getattr(before, name) != value]
    if wrong:
        raise Mistake(
            f"--resume: got {', '.join(wrong)}, which cannot change: all but {', '.join(map(flag, RESUMABLE))} are those of "
            f"{folder}. To score another file write: evaluate {folder} FILE"
        )
    return kind.Options(**{**before.__dict__, **given}).checked()


def absolute(given: dict[str, Any]) -> dict[str, Any]:
    """The options with absolute paths: a run may be resumed from another directory."""
    found = dict(given)
    for name in ("dev", "test", "embeddings"):
        found |= {name: os.path.abspath(given[name])} if given.get(name) else {}
    return found | ({"train": tuple(map(os.path.abspath, given["train"]))} if given.get("train") else {})


@contextlib.contextmanager
def _log(
    options: RunOptions, folder: Path, loader: cavs.data.Loader
) -> Iterator[tuple[Callable[[Any], Any], Callable[[Any], Any]]]:
    """A function of the metrics of each dispatch, and one of each evaluation."""
    if options.log == "none":
        yield (lambda sums: None), (lambda record: None)
        return
    writers = [cavs.data.json_lines(folder / "log.jsonl")]
    if options.log == "tensorboard":
        try:
            writers.append(cavs.data.tensorboard(folder))
        except ModuleNotFoundError as error:
            raise Mistake(f"--log: {error}") from error
    mean = lambda sums: {"loss": sums["loss"] / jnp.maximum(sums["count"], 1)}  # noqa: E731
    with cavs.data.Log(loader, *writers, metrics=mean) as log:
        yield log, lambda record: [write(record) for write in writers]
