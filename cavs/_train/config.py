"""`Config`: everything that decides a training run, as one value that a checkpoint can hold."""

import dataclasses
import typing
from typing import Any

# Each has a file, `task_NAME.py`; see `task.py`.
TASKS = ("classify", "lm", "nmt", "tag")
ALIASES = {"dag": "classify", "sentiment": "classify"}
OPTIMIZERS = ("adam", "adagrad", "sgd")
LOSSES = ("root", "all")
# Far beyond what anybody trains: a file that asks for more is refused before it takes all memory.
LARGEST = 2**31 - 1
MOST = dict.fromkeys(("hidden", "embedding_size", "batch", "epochs", "min_count", "char_size"), LARGEST)
MOST |= {"layers": 1000, "arity": 1000}  # a matrix each


class TrainError(ValueError):
    """A mistake in what was asked for: the command line prints its text and no traceback, and exits with `code`."""

    code = 2


class SaveError(TrainError):
    """What was asked for is right, but a file cannot be written."""

    code = 1


@dataclasses.dataclass(frozen=True)
class Config:
    """What `cavs train` was asked to do. `None` in `program`, `loss`, `score` and `embedding_size` is settled by the data.

    Fields are the command line's flags; `train` is `None` for the reviews that come with the package. Made by
    `cavs._train.task.configure`, which knows the tasks' defaults.
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
    column: str | None = None
    char_size: int = 32
    seed: int = 0

    def check(self) -> None:
        """**Raises:** `TrainError` that names the flag of a value out of range."""
        for name, most in MOST.items():
            value = getattr(self, name, None)
            _want(name, value, value is None or value >= 1, "an integer of at least 1")
            _want(name, value, value is None or value <= most, f"an integer of at most {most}")
        for name in ("patience", "vocab_size", "weight_decay", "clip", "seed"):
            _want(name, getattr(self, name), getattr(self, name) >= 0, "a number of at least 0")
        _want("lr", self.lr, self.lr > 0, "a number above 0")
        _want("embedding_lr", self.embedding_lr, self.embedding_lr is None or self.embedding_lr >= 0, "a number of at least 0")
        _want("dropout", self.dropout, 0 <= self.dropout < 1, "a probability from 0 up to, but without, 1")
        _want("optimizer", self.optimizer, self.optimizer in OPTIMIZERS, f"one of {', '.join(OPTIMIZERS)}")
        _want("loss", self.loss, self.loss in (None, *LOSSES), f"one of {', '.join(LOSSES)}")
        _want("score", self.score, self.score in (None, *LOSSES), f"one of {', '.join(LOSSES)}")
        _want("vocab_size", self.vocab_size, self.vocab_size == 0 or self.vocab_size >= 4, "0 (no limit) or at least 4")
        if self.train is None and (self.dev or self.test):
            name, path = ("--dev", self.dev) if self.dev else ("--test", self.test)
            raise TrainError(f"{name} was given without a file to train on: cavs train FILE {name} {path}")

    def replace(self, given: dict[str, Any]) -> "Config":
        """The same but for what was given, checked."""
        config = dataclasses.replace(self, **given)
        config.check()
        return config

    @staticmethod
    def from_json(value: Any) -> "Config":
        """What `as_json` made, checked.

        **Raises:** `TrainError` that names a field of another type or out of range.
        """
        fields = typing.get_type_hints(Config)
        if not isinstance(value, dict) or value.keys() != fields.keys():
            raise TrainError(f"config has not the fields {', '.join(fields)}.")
        for name, kind in fields.items():
            got = value[name]
            # A whole number of JSON may stand for a float; a bool is no number.
            right = isinstance(got, kind) or isinstance(got, int) and isinstance(0.0, kind)
            _want(name, got, right and not isinstance(got, bool), f"a value of type {getattr(kind, '__name__', kind)}")
        config = Config(**value)
        config.check()
        return config

    def as_json(self) -> dict[str, Any]:
        """A dict of plain values, for `Config(**...)`."""
        return dataclasses.asdict(self)


def flag(name: str) -> str:
    """How a field is written on the command line."""
    return "--" + name.replace("_", "-")


def _want(name: str, got: Any, right: bool, wanted: str) -> None:
    if not right:
        raise TrainError(f"{flag(name)} is {got!r}, wanted {wanted}.")
