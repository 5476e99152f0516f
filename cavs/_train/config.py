"""`Config`: all settings that determine a training run, as one value that a checkpoint can store."""

import dataclasses
import os
import typing
from pathlib import Path
from typing import Any

from cavs._graphs.suggest import suggestion

# Each task has a file, `task_NAME.py`; see `task.py`.
TASKS = ("classify", "lm", "nmt", "regress", "tag")
ALIASES = {"dag": "classify", "sentiment": "classify", "ner": "tag", "pos": "tag"}
OPTIMIZERS = ("adam", "adamw", "adagrad", "sgd")
LOGS = ("none", "json", "tensorboard")
SCHEDULES = ("constant", "linear", "cosine")
LOSSES = ("root", "all")
# Upper bounds far beyond any real model: a checkpoint with larger values is refused before memory is allocated for it.
LARGEST = 2**31 - 1
MOST = dict.fromkeys(("hidden", "embedding_size", "batch", "epochs", "min_count", "char_size"), LARGEST)
MOST |= {"layers": 1000, "arity": 1000}  # each unit is a matrix


class TrainError(ValueError):
    """An error of the user: the command line prints its text without a traceback and exits with `code`."""

    code = 2


class SaveError(TrainError):
    """A valid request that failed because a file cannot be written."""

    code = 1


@dataclasses.dataclass(frozen=True)
class Config:
    """The settings of `cavs train`. `None` in `program`, `loss`, `score` and `embedding_size` means: choose by the data.

    The fields are the flags of the command line. `train` is `None` for the reviews shipped with the package. `also` are further
    training files, separated by `os.pathsep`. Create a
    `Config` with `cavs._train.task.configure`, which knows the defaults of each task.
    """

    train: str | None = None
    also: str | None = None
    dev: str | None = None
    test: str | None = None
    task: str = "classify"
    program: str | None = None
    hidden: int = 100
    layers: int = 1
    embedding_size: int | None = None
    embeddings: str | None = None
    loss: str | None = None
    score: str | None = None
    batch: int = 20
    epochs: int = 20
    max_steps: int = 0
    save_every: int = 0
    memory: str | int | float = "none"
    devices: int = 1
    log: str = "none"
    optimizer: str = "adagrad"
    schedule: str = "constant"
    warmup: int = 0
    lr: float = 0.05
    embedding_lr: float | None = None
    weight_decay: float = 1e-5
    dropout: float = 0.2
    clip: float = 5.0
    patience: int = 0
    min_count: int = 1
    vocab_size: int = 0
    column: str | None = None
    char_size: int = 32
    seed: int = 0

    def check(self) -> None:
        """Raises a `TrainError` that names the flag if a value is out of range."""
        for name, most in MOST.items():
            value = getattr(self, name, None)
            _check(name, value, value is None or value >= 1, "an integer >= 1")
            _check(name, value, value is None or value <= most, f"an integer <= {most}")
        for name in ("patience", "max_steps", "save_every", "warmup", "vocab_size", "devices", "weight_decay", "clip", "seed"):
            _check(name, getattr(self, name), getattr(self, name) >= 0, "a number >= 0")
        _check("lr", self.lr, self.lr > 0, "a number > 0")
        _check("embedding_lr", self.embedding_lr, self.embedding_lr is None or self.embedding_lr >= 0, "a number >= 0")
        _check("dropout", self.dropout, 0 <= self.dropout < 1, "a probability >= 0 and < 1")
        _check("optimizer", self.optimizer, self.optimizer in OPTIMIZERS, f"one of {', '.join(OPTIMIZERS)}")
        _check("schedule", self.schedule, self.schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}")
        _check("log", self.log, self.log in LOGS, f"one of {', '.join(LOGS)}")
        _check("loss", self.loss, self.loss in (None, *LOSSES), f"one of {', '.join(LOSSES)}")
        _check("score", self.score, self.score in (None, *LOSSES), f"one of {', '.join(LOSSES)}")
        _check("vocab_size", self.vocab_size, self.vocab_size == 0 or self.vocab_size >= 4, "0 (no limit) or at least 4")
        if self.train is None and (self.dev or self.test):
            name, path = ("--dev", self.dev) if self.dev else ("--test", self.test)
            raise TrainError(f"{name}: got {path}, but no file to train on. Write: cavs train FILE {name} {path}")

    def replace(self, given: dict[str, Any]) -> "Config":
        """Returns a checked copy with the fields in `given` replaced."""
        config = dataclasses.replace(self, **given)
        config.check()
        return config

    @staticmethod
    def from_json(value: object) -> "Config":
        """Restores and checks what `as_json` returned.

        Raises a `TrainError` that names the field if a value has the wrong type or is out of range.
        """
        fields = typing.get_type_hints(Config)
        if not isinstance(value, dict) or value.keys() != fields.keys():
            raise TrainError(f"config: got {value!r:.60}; expected a dict of the fields {', '.join(fields)}.")
        for name, kind in fields.items():
            got = value[name]
            # A JSON integer is a valid float. A bool is not a valid number, although Python's bool is an int.
            right = isinstance(got, kind) or isinstance(got, int) and isinstance(0.0, kind)
            _check(name, got, right and not isinstance(got, bool), f"a value of type {getattr(kind, '__name__', kind)}")
        config = Config(**value)
        config.check()
        return config

    def as_json(self) -> dict[str, Any]:
        """A dict of plain values, the arguments of `Config(**...)`."""
        return dataclasses.asdict(self)


def flag(name: str) -> str:
    """A field as the user writes it on the command line: `FILE` or `--name`."""
    return "FILE" if name in ("train", "also", "file") else "--" + name.replace("_", "-")


def check_file(name: str, path: str) -> None:
    """Raises a `TrainError` if the file given as the field `name` does not exist or is not a regular file."""
    if Path(path).is_file():
        return
    what = "a directory" if Path(path).is_dir() else "which is not a regular file" if Path(path).exists() else None
    parent = Path(path).parent
    hint = "" if what or not parent.is_dir() else suggestion(Path(path).name, os.listdir(parent))
    raise TrainError(
        f"{flag(name)}: got {path}, {what or 'which does not exist'}; expected the path of a file. {hint}".rstrip()
    )


def _check(name: str, got: object, right: bool, expected: str) -> None:
    if not right:
        raise TrainError(f"{flag(name)}: got {got!r}; expected {expected}.")
