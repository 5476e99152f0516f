"""`Config`: everything that decides a training run, as one value that a checkpoint can hold."""

import dataclasses
from typing import Any

TASKS = ("classify", "lm")
OPTIMIZERS = ("adam", "adagrad", "sgd")
LOSSES = ("root", "all")


class TrainError(ValueError):
    """A mistake in what was asked for: the command line prints its text and no traceback."""


@dataclasses.dataclass(frozen=True)
class Config:
    """What `cavs train` was asked to do. `None` in `program`, `loss`, `score` and `embedding_size` is settled by the data.

    Fields are the command line's flags; `train` is `None` for the reviews that come with the package.
    """

    train: str | None = None
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
    optimizer: str = "adagrad"
    lr: float = 0.05
    embedding_lr: float | None = None
    weight_decay: float = 1e-5
    dropout: float = 0.2
    clip: float = 5.0
    patience: int = 0
    min_count: int = 1
    vocab_size: int = 0
    seed: int = 0

    @staticmethod
    def make(given: dict[str, Any]) -> "Config":
        """The task's defaults under what was given, checked.

        **Raises:** `TrainError` that names the flag.
        """
        task = given.get("task", "classify")
        if task not in TASKS:
            raise TrainError(f"--task is {task!r}, wanted one of {', '.join(TASKS)}.")
        config = Config(**(_DEFAULTS[task] | given))
        config._check(given)
        return config

    def _check(self, given: dict[str, Any]) -> None:
        for name in ("hidden", "embedding_size", "layers", "batch", "epochs", "min_count"):
            value = getattr(self, name)
            _want(name, value, value is None or value >= 1, "an integer of at least 1")
        for name in ("patience", "vocab_size", "weight_decay", "clip", "seed"):
            _want(name, getattr(self, name), getattr(self, name) >= 0, "a number of at least 0")
        _want("lr", self.lr, self.lr > 0, "a number above 0")
        _want("embedding_lr", self.embedding_lr, self.embedding_lr is None or self.embedding_lr >= 0, "a number of at least 0")
        _want("dropout", self.dropout, 0 <= self.dropout < 1, "a probability from 0 up to, but without, 1")
        _want("optimizer", self.optimizer, self.optimizer in OPTIMIZERS, f"one of {', '.join(OPTIMIZERS)}")
        _want("loss", self.loss, self.loss in (None, *LOSSES), f"one of {', '.join(LOSSES)}")
        _want("score", self.score, self.score in (None, *LOSSES), f"one of {', '.join(LOSSES)}")
        _want("vocab_size", self.vocab_size, self.vocab_size == 0 or self.vocab_size >= 4, "0 (no limit) or at least 4")
        if self.task == "lm":
            if self.train is None:
                raise TrainError("--task lm needs a text file, one sentence a line: cavs train --task lm FILE")
            for name in ("loss", "score"):
                if given.get(name) is not None:
                    raise TrainError(f"{flag(name)} is for classification; a language model predicts at every vertex.")
        if self.train is None and (self.dev or self.test):
            name, path = ("--dev", self.dev) if self.dev else ("--test", self.test)
            raise TrainError(f"{name} was given without a file to train on: cavs train FILE {name} {path}")

    def replace(self, given: dict[str, Any]) -> "Config":
        """The same but for what was given, checked."""
        config = dataclasses.replace(self, **given)
        config._check({})
        return config

    def as_json(self) -> dict[str, Any]:
        """A dict of plain values, for `Config(**...)`."""
        return dataclasses.asdict(self)


_DEFAULTS: dict[str, dict[str, Any]] = {
    "classify": {},
    "lm": {
        "hidden": 200,
        "epochs": 10,
        "optimizer": "adam",
        "lr": 0.002,
        "weight_decay": 0.0,
        "min_count": 2,
        "loss": "all",
        "score": "all",
    },
}


def flag(name: str) -> str:
    """How a field is written on the command line."""
    return "--" + name.replace("_", "-")


def _want(name: str, got: Any, right: bool, wanted: str) -> None:
    if not right:
        raise TrainError(f"{flag(name)} is {got!r}, wanted {wanted}.")
