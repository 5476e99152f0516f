"""A whole training run: data, model, folder, loop, and the messages of the run."""

import contextlib
import os
import shlex
import time
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.markup import escape

import cavs
from cavs._train import checkpoint, folder as folders, report
from cavs._train.config import Config, SaveError, TrainError, flag
from cavs._train.data import Data
from cavs._train.loop import Progress, Trainer
from cavs._train.model import weight_shapes
from cavs._train.step import State, init_state
from cavs._train.stop import Stop
from cavs._train.task import Model, configure, find_task

# The settings that may be given with --resume: no step depends on them.
RESUMABLE = ("epochs", "patience")


def train(given: dict[str, Any], out: str | None = None, resume: str | None = None, console: Console | None = None) -> int:
    """Trains with the settings `given` (fields of `Config`), or resumes the run in the folder `resume`.

    Args:
        given: the settings that the user gave.
        out: the folder of a new run; `None` creates one under `runs/`.
        resume: the folder of the run to resume; "" for the latest under `runs/`; `None` for a new run.
        console: where messages are printed.

    Returns:
        The exit code: 0, or 128 + the number of the signal that stopped the training.

    Raises:
        TrainError: the settings or files are invalid, or a file cannot be written.
    """
    console = console or Console()
    started = time.monotonic()
    config, folder = _prepare(given, out, resume)
    task = find_task(config.task)
    config, data = task.read(config)
    model = task.model(config, data)
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = stack.enter_context(folders.new(config, out))
        else:
            stack.enter_context(folders.locked(folder))
        try:
            return _train(console, config, data, model, folder, resume is not None, started)
        except (SaveError, OSError) as error:
            saved = (folder / "model.json").exists() and (folder / "last.json").exists()
            how = f"cavs train --resume {shlex.quote(str(folder))}" if saved else "the same command"
            what = (
                "The last save is intact. Fix the problem and resume"
                if saved
                else "Nothing was saved. Fix the problem and start"
            )
            raise SaveError(f"{_message(error)} Training stopped. {what} with: {how}") from error


def _train(console: Console, config: Config, data: Data, model: Model, folder: Path, resumed: bool, started: float) -> int:
    about = {
        "cavs": cavs.__version__,
        "task": config.task,
        "config": config.as_json(),
        "model": model.describe(),
        "words": data.words,
        "labels": None if data.labels is data.words else data.labels,
        "files": data.files,
        **({"facts": data.facts} if data.facts else {}),
    }
    task = find_task(config.task)
    state, progress = init_state(model, config, data.vectors), Progress()
    if resumed:
        trainer = Trainer(config, data, model, folder, _check_same(folder, about))
        state, progress = trainer.resume(state)
    else:
        trainer = Trainer(config, data, model, folder)
        # Save before the first step, and write `model.json`, which marks the folder as a run, last. A run that is killed at any
        # time can then be resumed or started again.
        trainer.save(state, progress)
    checkpoint.write_json(folder / "model.json", {"run": trainer.run, **about})
    _introduce(console, config, data, folder, progress, trainer)

    with Stop() as stop, report.Screen(console, task, config.epochs) as screen:
        state = trainer.fit(state, progress, stop, screen)
    if stop:
        _print_stopped(console, folder, progress, trainer)
        return 128 + (stop.signum or 0)
    _finish(console, config, data, trainer, state, progress, time.monotonic() - started)
    return 0


def _prepare(given: dict[str, Any], out: str | None, resume: str | None) -> tuple[Config, Path | None]:
    """The configuration and, if a run is resumed, its folder."""
    if resume is None:
        if out is not None:
            folders.refuse_another_run(Path(out))
        files = {name: os.path.abspath(given[name]) for name in ("train", "dev", "test", "embeddings") if given.get(name)}
        return configure(given | files), None
    folder = folders.latest(out) if resume == "" else Path(resume)
    wrong = [name for name in given if name not in RESUMABLE and name != "task"]
    if wrong:
        raise TrainError(
            f"--resume: got {', '.join(map(flag, wrong))}; expected only {' and '.join(map(flag, RESUMABLE))} with it, because "
            f"all other settings are those of {folder}."
        )
    if not (folder / "model.json").exists():
        raise TrainError(f"--resume: got {folder}; expected the folder of a run, as `cavs train --out DIR` writes it.")
    saved = checkpoint.read_model(folder)["config"]
    return Config.from_json(saved).replace({name: given[name] for name in RESUMABLE if name in given}), folder


def _check_same(folder: Path, about: dict[str, Any]) -> str:
    """The identifier of the run in a folder. Raises a `TrainError` if it was trained on other files or another model."""
    saved = checkpoint.read_model(folder)
    changed = [path for path, print_ in about["files"].items() if saved["files"].get(path, print_) != print_]
    if changed:
        raise TrainError(f"--resume: {changed[0]} has changed since {folder} was trained on it; expected the same file.")
    if saved["model"] != about["model"] or saved["words"] != list(about["words"]):
        raise TrainError(
            f"--resume: {folder} was trained by cavs {saved.get('cavs')}, this is cavs {about['cavs']}; expected the same "
            "version."
        )
    return saved["run"]


def _message(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'} cannot be written or read ({error.strerror or error})."
    return str(error)


def _introduce(console: Console, config: Config, data: Data, folder: Path, progress: Progress, trainer: Trainer) -> None:
    size = sum(x.size for x in jax.tree.leaves(weight_shapes(trainer.model)))
    source = "the reviews shipped with cavs" if config.train is None else config.train
    console.print(f"[bold]{escape(source)}[/]: {report.describe(data, trainer.task)}", highlight=False, soft_wrap=True)
    console.print(
        f"{config.program}, hidden {config.hidden}, word vectors of {config.embedding_size}, {size:,} parameters; "
        f"{config.optimizer}, batch {config.batch}, loss at {'the roots' if config.loss == 'root' else 'every vertex'}",
        highlight=False,
        soft_wrap=True,
    )
    if data.vectors is not None:
        found, total = int(data.vectors.found.sum()), len(data.words)
        console.print(
            f"{found} of {total} words ({100 * found / total:.1f} %) have a vector in {escape(str(config.embeddings))}; "
            "the others are initialised at random",
            highlight=False,
            soft_wrap=True,
        )
    if progress.epoch or progress.step:
        console.print(
            f"resuming {folder} at epoch {progress.epoch + 1}, step {progress.step} of {trainer.steps}", highlight=False
        )
    for note in (*data.notes, *trainer.notes):
        console.print(escape(note), highlight=False, soft_wrap=True)


def _print_stopped(console: Console, folder: Path, progress: Progress, trainer: Trainer) -> None:
    console.print(
        f"stopped in epoch {progress.epoch + 1} after step {progress.step} of {trainer.steps}. Everything is saved. To resume, "
        f"with the same result as without the stop:\n  cavs train --resume {shlex.quote(str(folder))}",
        highlight=False,
        soft_wrap=True,
    )


def _finish(
    console: Console, config: Config, data: Data, trainer: Trainer, state: State, progress: Progress, seconds: float
) -> None:
    best = progress.best(config)
    assert best is not None
    results = {"while training": best["train"], "held-out": best["dev"]}
    if data.test is not None:
        weights, _ = checkpoint.load(trainer.folder, "best", state.weights, trainer.run)
        results["test"] = trainer.evaluate(weights, data.test)
        checkpoint.write_json(
            trainer.folder / "test.json", {"run": trainer.run, "epoch": best["epoch"], "test": results["test"]}
        )
    task = trainer.task
    report.plot(trainer.folder / "curve.png", progress.history, task)
    console.print(task.results(data, results))
    step, evaluation = trainer.compilations
    fastest = min(record["seconds"] for record in progress.history)
    speed = data.train.num_vertices / fastest
    console.print(
        f"{seconds:.0f} s in total; fastest epoch {fastest:.2f} s ({trainer.steps} steps, {speed:,.0f} vertices per second); "
        f"batch shapes compiled: {step} for training, {evaluation} for evaluation",
        highlight=False,
        soft_wrap=True,
    )
    _print_next(console, config, trainer, best["epoch"])


def _print_next(console: Console, config: Config, trainer: Trainer, best: int) -> None:
    where = shlex.quote(str(trainer.folder))
    file = "FILE" if config.train is None else shlex.quote(os.path.relpath(config.train))
    console.print(
        f"checkpoint (epoch {best}) and training curve: {where}, {where}/curve.png\n\n[bold]next[/]",
        highlight=False,
        soft_wrap=True,
    )
    lines = [(f"cavs predict {where} FILE", trainer.task.predicts)]
    if trainer.task.inspectable and config.train:
        lines += [(f"cavs inspect {file}", "show the contents of a file and its batches")]
    lines += [(f"cavs train --resume {where} --epochs {2 * config.epochs}", "train longer")]
    if config.train is None:
        lines += [("cavs train FILE", "train on your own data: trees, DAGs (cavs train --help)")]
    width = max(len(command) for command, _ in lines)
    for command, what in lines:
        console.print(f"  {escape(command.ljust(width))}  [dim]{what}[/]", highlight=False, soft_wrap=True)
