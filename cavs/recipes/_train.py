"""A training run of a recipe: its devices, data, step and loop, and what it leaves in its folder."""

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

import cavs
from cavs.recipes._data import Data
from cavs.recipes._options import RESUMABLE, Mistake, RunOptions, flag
from cavs.recipes._recipe import Recipe, optimizer
from cavs.recipes._report import CURVE, LOG, TEST, Messages

EVALUATION_BATCHES = 4  # an evaluation batch has the size of this many training batches
MSG_TAKEN = "--out: got {out}, which already contains a run; expected another folder. To continue, write --resume {out}."


def mesh_of(options: RunOptions) -> Mesh | None:
    """The devices of a run as a mesh; `None` for one. Raises a `Mistake` if JAX sees fewer, or they cannot share a batch."""
    visible, processes = jax.device_count(), jax.process_count()
    count = options.devices or visible
    if count > visible or processes > 1 and count != visible:
        at_most = "at most " if processes == 1 else ""
        raise Mistake(
            f"--devices: got {count}; expected {at_most}{visible}, the devices that JAX sees ({jax.default_backend()}). Write "
            "--devices 0 for all of them. For several on a CPU, set XLA_FLAGS=--xla_force_host_platform_device_count=4."
        )
    if count == 1:
        return None
    if options.batch % count:
        batch = -(-options.batch // count) * count
        raise Mistake(f"--batch: got {options.batch} for {count} devices; expected a multiple. Write --batch {batch}.")
    if options.memory != "none":
        raise Mistake(f"--memory: got {options.memory!r} with {count} devices; expected one device. Omit one of them.")
    return Mesh(jax.devices()[:count], ("data",))


class Run:
    """A run: the recipe, its loaders, and its compiled step."""

    def __init__(self, recipe: Recipe, data: Data):
        self.recipe, self.data, options = recipe, data, recipe.options
        self.mesh = mesh_of(options)
        self.like = jax.eval_shape(lambda: recipe.init(jax.random.key(0)))
        self.loader = self._loader(1)
        steps = options.epochs * len(self.loader)
        self.total = min(steps, options.max_steps or steps)
        self.rule = optimizer(options, self.total)
        self.memory = self._memory()
        parts = 1 if self.memory is None else self.memory[0]
        self.loader = self._loader(parts) if parts > 1 else self.loader
        self.step = self._step(parts)
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
            budget = cavs.memory.bytes_of(memory, "train", "--memory")
        except ValueError as error:
            raise Mistake(str(error).removeprefix("train: ")) from error
        parts, needed = cavs.memory.fewest_parts(self._measure, batch, budget or "min", "--memory")
        return parts, batch // parts, needed

    def _measure(self, parts: int) -> int:
        """The bytes that XLA needs for a step: state, batches, and temporary memory. Compiles it."""
        loader, state = self._loader(parts), jax.eval_shape(self.initial)
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), loader.largest())
        memory = self._step(parts).lower(state, batch).compile().memory_analysis()
        size = lambda tree: sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
        return memory.temp_size_in_bytes + size(state) + loader.on_device * size(batch)

    def _step(self, parts: int) -> cavs.data.Step[Any, Any]:
        """The step of a batch, or of one that comes in parts. Its state is `(params, moments, steps done)`."""
        recipe, options = self.recipe, self.recipe.options

        def step(state: Any, batch: Any) -> tuple[Any, Any]:
            params, moments, count = state
            key = jax.random.fold_in(jax.random.key(options.seed + 1), count) if options.dropout else None
            loss = functools.partial(recipe.loss, key=key)
            if parts > 1:
                loss, batch = cavs.memory.sub_batched(loss, has_aux=True), [batch]
            (_, sums), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
            terms = jnp.maximum(sums["count"], 1)  # the loss is a sum, and sums add up over parts and devices
            updates, moments = self.rule.update(jax.tree.map(lambda g: g / terms.astype(g.dtype), grads), moments, params)
            return (optax.apply_updates(params, updates), moments, count + 1), sums

        return cavs.data.step(step, tune=options.tune)

    def initial(self) -> Any:
        """The state before the first step, which depends on the seed."""
        params = self.recipe.init(jax.random.key(self.recipe.options.seed), self.data.vectors)
        return params, self.rule.init(params), jnp.zeros((), jnp.int32)

    def evaluate(self, params: Any, part: str) -> dict[str, float]:
        """The summed metrics of a part of the data, without dropout."""
        if part not in self._evaluated:
            batch = EVALUATION_BATCHES * self.recipe.options.batch if self.memory is None else self.memory[1]
            self._evaluated[part] = self.recipe.in_order(self.data.parts[part], batch, mesh=self.mesh)
        return self.recipe.held_out(params, self.data.parts[part], self._evaluated[part])


def _check_out(out: Path) -> None:
    """Raises `Mistake` if a run in the folder `out` would replace files."""
    if (out / "model.json").exists():
        raise Mistake(MSG_TAKEN.format(out=out))
    if out.exists() and not out.is_dir():
        raise Mistake(f"--out: got {out}, a file; expected a folder, which is created if it does not exist.")
    if others := [x for x in (CURVE, TEST) if (out / x).exists()]:
        raise Mistake(f"--out: got {out}, which has a {others[0]} of its own; expected another folder, as training writes one.")


def train(kind: type[Recipe], options: RunOptions, out: str | None, resume: Path | None, command: str) -> int:
    """Trains a recipe in the folder `out`, or in a new one under `runs/`, or resumes the run in the folder `resume`.

    Returns the exit code. `command`: how the user starts a command, for messages.
    """
    started = time.monotonic()
    if resume is None and out is not None:
        _check_out(Path(out))
    data = kind.read(options)
    run = Run(kind(options, data.facts), data)
    facts = {"task": kind.name, "cavs": cavs.__version__, "options": options.as_json()}
    facts |= {"facts": json.loads(json.dumps(data.facts))}
    if resume is not None and (before := cavs.data.read_run(resume))["facts"] != facts["facts"]:
        versions = f"{resume} was trained by cavs {before.get('cavs')}, this is cavs {facts['cavs']}"
        raise Mistake(f"--resume: {versions}; expected the same version and files.")
    stem = Path(options.train[0]).name.lstrip(".").split(".")[0] if options.train else "reviews"
    create = Path if out or jax.process_count() > 1 else cavs.data.new_folder  # all processes have one folder
    folder = resume or create(out or f"runs/{stem}")
    limits = {"epochs": options.epochs, "steps": options.max_steps, "patience": options.patience, "every": options.save_every}
    keeper = cavs.data.Keeper(folder, run.loader, run.recipe.score, facts=facts, files=options.files(), **limits)
    messages = Messages(command, run, keeper)
    try:
        with keeper:
            if resume is None and (folder / "model.json").exists():
                raise Mistake(MSG_TAKEN.format(out=folder))  # another run has started meanwhile
            _loop(run, keeper, messages)
            if keeper.stopped:
                messages.stopped()
                return 128 + keeper.stopped
            messages.finish(time.monotonic() - started)
            return 0
    except FloatingPointError as error:
        raise Mistake(f"{error} Try a smaller --lr or --clip.") from error
    except (OSError, MemoryError, jax.errors.JaxRuntimeError) as error:
        raise messages.failure(error) from error


def _loop(run: Run, keeper: cavs.data.Keeper, messages: Messages) -> None:
    """Runs the training loop from the last save to its end, or until a signal stops it."""
    recipe, writers = run.recipe, _writers(run.recipe.options, keeper.folder)
    state = keeper.restore(jax.jit(run.initial)())
    mean = lambda sums: {"loss": sums["loss"] / jnp.maximum(sums["count"], 1)}  # noqa: E731
    messages.introduce()
    with cavs.data.Log(run.loader, *writers, metrics=mean) as log, messages.bar() as advance:
        for batches in keeper:
            state, sums = run.step(state, batches)
            messages.tuned()
            if writers:
                log(sums)
            due = keeper.add(state, sums)
            advance()
            if due:
                held_out = run.evaluate(state[0], "dev")
                messages.evaluated(best=keeper.score(state, held_out, best=state[0]))
                scores = {"held_out_loss": held_out["loss"] / max(held_out["count"], 1), "score": recipe.score(held_out)}
                place = {"step": run.loader.seen, "epoch": run.loader.epoch, "batch": run.loader.batch}  # as in other reports
                for write in writers:
                    write(place | scores)


def _writers(options: RunOptions, folder: Path) -> list[Callable[[dict[str, float]], object]]:
    """What `--log` writes: functions of a report, for `cavs.data.Log`."""
    if options.log == "none":
        return []
    writers = [cavs.data.json_lines(folder / LOG)]
    if options.log == "tensorboard":
        try:
            writers.append(cavs.data.tensorboard(folder))
        except ModuleNotFoundError as error:
            raise Mistake(f"--log: {error}") from error
    return writers


def tune(kind: type[Recipe], options: RunOptions) -> int:
    """Times layouts of the kernels of a training run, keeps the fastest, and prints all. Returns the exit code.

    Raises a `Mistake` if the kernels cannot run here, or not in this recipe.
    """
    data = kind.read(options)
    run = Run(kind(options, data.facts), data)
    try:
        launches = run.step.tune(jax.eval_shape(run.initial), next(iter(run.loader)))
    except ValueError as error:
        if not str(error).startswith("Step.tune: "):
            raise
        raise Mistake(str(error).removeprefix("Step.tune: ")) from error
    print(*(launch.table() for launch in launches), sep="\n")
    return 0


def saved(folder: Path, kind: type[Recipe], changes: dict[str, Any]) -> RunOptions:
    """The options of the run in a folder, with `changes`. Raises a `Mistake` if one cannot change."""
    about = cavs.data.read_run(folder)
    if about.get("task") != kind.name:
        raise Mistake(f"--task: got {kind.name} with --resume {folder}; expected {about.get('task')}, the task of this run.")
    before = kind.Options.from_json(about["options"], f"{folder}/model.json")
    options = dataclasses.replace(before, **changes).checked()
    wrong = [flag(name) for name in changes if name not in RESUMABLE and getattr(before, name) != getattr(options, name)]
    if wrong:
        raise Mistake(
            f"--resume: got {', '.join(wrong)}, which cannot change: all but {', '.join(map(flag, RESUMABLE))} are those of "
            f"{folder}. To score another file write: evaluate {folder} FILE"
        )
    return options
