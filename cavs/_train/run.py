"""A whole training run: data, model, folder, loop, and the messages of the run."""

import contextlib
import os
import shlex
import time
from pathlib import Path
from typing import Any

from rich.console import Console

import cavs
from cavs._train import checkpoint, folder as folders, report
from cavs._train.compiled import allocate_when_needed
from cavs._train.config import ALIASES, Config, SaveError, TrainError, flag
from cavs._train.data import Data
from cavs._train.devices import lost, told, wait_for_all, writes
from cavs._train.loop import Progress, Trainer
from cavs._train.memory import needs_little
from cavs._train.memory_error import OUT_OF_MEMORY, out_of_memory
from cavs._train.messages import Messages
from cavs._train.settings import changed
from cavs._train.step import begin
from cavs._train.stop import Stop
from cavs._train.task import Model, configure, find_task

# The settings that --resume may change. The others determine the data, the model, or the order of the batches.
RESUMABLE = (
    *("epochs", "max_steps", "patience", "save_every", "memory", "devices", "log"),
    *("lr", "embedding_lr", "schedule", "warmup", "weight_decay", "clip", "dropout"),
)


# The settings that are paths. A checkpoint stores them as absolute paths.
FILES = ("train", "dev", "test", "embeddings")


def train(
    given: dict[str, Any],
    out: str | None = None,
    resume: str | None = None,
    console: Console | None = None,
    command: str = "cavs",
) -> int:
    """Trains with the settings `given` (fields of `Config`), or resumes the run in the folder `resume`.

    Args:
        given: the settings that the user gave.
        out: the folder of a new run; `None` creates one under `runs/`.
        resume: the folder of the run to resume; "" for the latest under `runs/`; `None` for a new run.
        console: where messages are printed.
        command: how the user starts cavs, for the commands in messages.

    Returns:
        The exit code: 0, or 128 + the number of the signal that stopped the training.

    Raises:
        TrainError: the settings or files are invalid, or a file cannot be written.
    """
    started = time.monotonic()
    config, folder = _prepare(given, out, resume)
    task = find_task(config.task)
    config, data = task.read(config)
    if needs_little(config, data):
        allocate_when_needed()
    model = task.model(config, data)
    messages = Messages(console or Console(quiet=not writes()), command)
    with contextlib.ExitStack() as stack:
        if not writes():
            folder = Path(told(None))
        elif folder is None:
            folder = stack.enter_context(folders.new(config, out))
        else:
            stack.enter_context(folders.locked(folder))
        if writes():
            told(os.path.abspath(folder))
        try:
            return _train(messages, config, data, model, folder, resume is not None, started)
        except (SaveError, OSError) as error:
            raise SaveError(f"{_message(error)} Training stopped. {messages.how_to_resume(folder)}") from error
        except OUT_OF_MEMORY as error:
            if lost(error):
                raise SaveError(
                    f"another process of this run ended ({str(error):.200}). {messages.how_to_resume(folder)}"
                ) from error
            if not out_of_memory(error):
                raise
            lower = f"Lower --batch (now {config.batch}) or --hidden (now {config.hidden}), or write --memory 0.8"
            raise SaveError(f"out of memory. {lower}. {messages.how_to_resume(folder)}") from error


def _train(messages: Messages, config: Config, data: Data, model: Model, folder: Path, resumed: bool, started: float) -> int:
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
    (like, initial), progress = begin(model, config, data.vectors), Progress()
    if resumed:
        saved = _check_same(folder, about)
        trainer = Trainer(config, data, model, folder, saved["run"])
        trainer.notes += changed(Config.from_json(saved["config"]), config)
        state, progress = trainer.resume(like)
        if trainer.is_done(progress):
            trainer.notes.append(messages.nothing_left(config, trainer))
        else:
            trainer.compile_ahead(like)
    else:
        trainer = Trainer(config, data, model, folder)
        trainer.compile_ahead(like)
        state = initial()
        # Save before the first step, and write `model.json`, which marks the folder as a run, last. A run that is killed at any
        # time can then be resumed or started again.
        trainer.save(state, progress)
    checkpoint.write_json(folder / "model.json", {"run": trainer.run, **about})
    messages.introduce(config, data, progress, trainer)

    with Stop() as stop, report.Screen(messages.console, trainer) as screen:
        state = trainer.fit(state, progress, stop, screen)
    if stop:
        messages.stopped(progress, trainer)
        return 128 + (stop.signum or 0)
    best = progress.best(config)
    assert best is not None
    results = {"while training": best["train"], "held-out": best["dev"]}
    if data.test is not None:
        wait_for_all("best")
        weights, _ = checkpoint.load(folder, "best", state.weights, trainer.run)
        results["test"] = trainer.evaluate(weights, data.test)
        checkpoint.write_json(folder / "test.json", {"run": trainer.run, "epoch": best["epoch"], "test": results["test"]})
    report.plot(folder / "curve.png", progress.records, trainer.task, best["epoch"])
    messages.finish(config, data, progress, trainer, results, time.monotonic() - started)
    return 0


def _prepare(given: dict[str, Any], out: str | None, resume: str | None) -> tuple[Config, Path | None]:
    """The configuration and, if a run is resumed, its folder."""
    if resume is None:
        if out is not None:
            folders.refuse_another_run(Path(out))
        files = {name: os.path.abspath(given[name]) for name in FILES if given.get(name)}
        return configure(given | files), None
    folder = folders.latest(out) if resume == "" else Path(resume)
    if not (folder / "model.json").exists():
        raise TrainError(f"--resume: got {folder}; expected the folder of a run, as `cavs train --out DIR` writes it.")
    saved = Config.from_json(checkpoint.read_model(folder)["config"])
    given = {"task": saved.task} | given
    given["task"] = ALIASES.get(given["task"], given["task"])
    files = {name: os.path.abspath(given[name]) for name in FILES if given.get(name)}
    wrong = [name for name, value in (given | files).items() if name not in RESUMABLE and getattr(saved, name) != value]
    if wrong:
        raise TrainError(
            f"--resume: got {', '.join(map(flag, wrong))}, which cannot change: all but {', '.join(map(flag, RESUMABLE))} are "
            f"those of {folder}. To score another file write: cavs evaluate {shlex.quote(str(folder))} FILE"
        )
    return saved.replace({name: given[name] for name in RESUMABLE if name in given}), folder


def _check_same(folder: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The facts about the run in a folder. Raises a `TrainError` if it was trained on other files or another model."""
    saved = checkpoint.read_model(folder)
    stale = [path for path, print_ in about["files"].items() if saved["files"].get(path, print_) != print_]
    if stale:
        raise TrainError(f"--resume: {stale[0]} has changed since {folder} was trained on it; expected the same file.")
    if _without_dropout(saved["model"]) != _without_dropout(about["model"]) or saved["words"] != list(about["words"]):
        raise TrainError(
            f"--resume: {folder} was trained by cavs {saved.get('cavs')}, this is cavs {about['cavs']}; expected the same "
            "version."
        )
    return saved


def _without_dropout(model: dict[str, Any]) -> dict[str, Any]:
    fields = {name: value for name, value in model["program_fields"].items() if name != "dropout"}
    return {name: value for name, value in model.items() if name != "dropout"} | {"program_fields": fields}


def _message(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'} cannot be written or read ({error.strerror or error})."
    return str(error)
