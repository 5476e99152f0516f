"""The options of a recipe: a dataclass, which becomes a command line, and is read from TOML and JSON."""

import argparse
import dataclasses
import difflib
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

LARGEST = 2**31 - 1
# The options that `--resume` may change. The others determine the data, the model, or the order of the batches.
RESUMABLE = (
    *("epochs", "max_steps", "patience", "save_every", "memory", "devices", "tune", "log"),
    *("lr", "embedding_lr", "schedule", "warmup", "weight_decay", "clip", "dropout"),
)
T = TypeVar("T", bound="RunOptions")


class Mistake(ValueError):
    """A mistake of the user: the command prints its text without a traceback, and exits with `code`."""

    def __init__(self, text: str, code: int = 2):
        super().__init__(text)
        self.code = code


def option(
    default: Any, help: str, *, least: float | None = None, most: float = LARGEST, choices: tuple[str | None, ...] = ()
) -> Any:
    """Declares a field of `RunOptions`.

    Args:
        default: the default.
        help: the help text.
        least: the smallest number.
        most: the largest number.
        choices: the words that are allowed.
    """
    about = {"help": help, "least": least, "most": most, "choices": choices}
    return dataclasses.field(default=default, metadata=about)


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """The options that all recipes have. A recipe adds its own, and changes defaults, in a subclass."""

    train: tuple[str, ...] = option((), "the training data")
    dev: str | None = option(None, "held-out data that choose the best epoch (default: a tenth of FILE, drawn with the seed)")
    test: str | None = option(None, "data on which the best epoch is tested at the end")
    hidden: int = option(100, "hidden units", least=1)
    embedding_size: int | None = option(None, "size of a word's vector (default: the value of --hidden)", least=1)
    dropout: float = option(0.2, "dropout of inputs and before the last layer", least=0, most=0.999)
    min_count: int = option(1, "rarer words become <unk>", least=1)
    vocab_size: int = option(0, "keep the N most frequent words; 0: all", least=0)
    batch: int = option(20, "samples per step", least=1)
    epochs: int = option(20, "passes over the data", least=1)
    max_steps: int = option(0, "stop after N steps in all; 0: after --epochs", least=0)
    patience: int = option(0, "stop after N epochs without a better score; 0 never stops early", least=0)
    save_every: int = option(0, "evaluate and save after every N steps of an epoch; 0: only save, every 5 minutes", least=0)
    optimizer: str = option("adagrad", "the optimizer", choices=("adam", "adamw", "adagrad", "sgd"))
    lr: float = option(0.05, "learning rate", least=1e-30)
    schedule: str = option(
        "constant", "how the learning rate falls to 0 until the end", choices=("constant", "linear", "cosine")
    )
    warmup: int = option(0, "steps in which the learning rate rises from 0", least=0)
    embedding_lr: float | None = option(None, "learning rate of word vectors; 0 freezes them (default: that of --lr)", least=0)
    weight_decay: float = option(0.0, "decay of weight matrices: added to the gradient; with adamw, to the update", least=0)
    clip: float = option(5.0, "largest norm of the gradient; 0 disables clipping", least=0)
    seed: int = option(0, "seed of initial values, batches and dropout", least=0)
    memory: str = option(
        "none",
        "most memory of a training step: 2GiB, bytes, a fraction of the device such as 0.5, or min; batches are then computed "
        "in parts, with the same results up to rounding",
    )
    devices: int = option(1, "devices that share each batch, with the same results up to rounding; 0: all", least=0)
    tune: float = option(10.0, "seconds in which the first step tunes its kernels on a new GPU; 0: never", least=0)
    log: str = option("none", "write loss and speed to log.jsonl, or also event files", choices=("none", "json", "tensorboard"))

    def checked(self: T) -> T:
        """Returns the options. Raises a `Mistake` that names the flag if a value is out of range."""
        for field in dataclasses.fields(self):
            value, about = getattr(self, field.name), field.metadata
            if about["choices"] and value not in about["choices"]:
                raise Mistake(
                    f"{flag(field.name)}: got {value!r}; expected one of {', '.join(filter(None, about['choices']))}."
                )
            least, most = about["least"], about["most"]
            if value is not None and least is not None and not least <= value <= most:
                raise Mistake(f"{flag(field.name)}: got {value!r}; expected a number from {least:g} to {most:g}.")
        return self

    def as_json(self) -> dict[str, Any]:
        """The options as a dict for JSON."""
        return {name: list(x) if isinstance(x, tuple) else x for name, x in dataclasses.asdict(self).items()}

    @classmethod
    def from_json(cls: type[T], values: object, where: str = "options") -> T:
        """Restores and checks what `as_json` returned. Raises a `Mistake` that names the field.

        Options of `RESUMABLE` may be missing, as an earlier version may have had fewer: they take their defaults.
        """
        kinds = kinds_of(cls)
        if not isinstance(values, dict) or not kinds.keys() - {*RESUMABLE} <= values.keys() <= kinds.keys():
            raise Mistake(f"{where}: got {values!r:.60}; expected a dict of the options {', '.join(kinds)}.")
        return cls(**{name: converted(kinds[name], value, f"{where}: {name}") for name, value in values.items()}).checked()


def kinds_of(options: type[RunOptions]) -> dict[str, type]:
    """The type of each option: `str`, `int`, `float`, or `tuple` of paths; without `None`."""
    found = {}
    for name, kind in typing.get_type_hints(options).items():
        some = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
        found[name] = next(typing.get_origin(k) or k for k in some if k is not type(None))
    return found


def converted(kind: type, value: Any, where: str) -> Any:
    """A value of TOML or JSON as that of an option. Raises a `Mistake` if it has another type."""
    if value is None or type(value) is kind:
        return value
    if kind is float and type(value) is int:
        return float(value)
    if kind is str and type(value) in (int, float):  # memory = 0.5
        return str(value)
    if kind is tuple and isinstance(value, str | list) and all(isinstance(x, str) for x in value):
        return (value,) if isinstance(value, str) else tuple(value)
    raise Mistake(f"{where}: got {value!r}; expected a value of type {'str' if kind is tuple else kind.__name__}.")


def flag(name: str) -> str:
    """Returns an option as the user writes it: `FILE` or `--name`."""
    return "FILE" if name in ("train", "file") else "--" + name.replace("_", "-")


def suggestion(name: str, known: Iterable[str]) -> str:
    """`Did you mean ...?`, or an empty text."""
    near = difflib.get_close_matches(name.lower(), [*known], 1, 0.6)
    return f"Did you mean {near[0]}?" if near else ""


def check_file(name: str, path: str) -> None:
    """Raises a `Mistake` if the file given as the option `name` does not exist or is not a regular file."""
    if Path(path).is_file():
        return
    what = "a directory" if Path(path).is_dir() else "which is not a regular file" if Path(path).exists() else None
    parent = Path(path).parent
    hint = "" if what or not parent.is_dir() else suggestion(Path(path).name, os.listdir(parent))
    raise Mistake(f"{flag(name)}: got {path}, {what or 'which does not exist'}; expected the path of a file. {hint}".rstrip())


class Parser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` that suggests options and commands for misspelled ones."""

    def error(self, message: str) -> NoReturn:
        """Prints the usage, the message, and a suggestion, and exits with code 2."""
        wrong = re.findall(r"--[\w-]+", message) if message.startswith("unrecog") else re.findall(r"choice: '(\S+)'", message)
        of = re.match(r"argument (\S+): invalid choice", message)
        known = [name for action in self._actions for name in action.option_strings]
        if of:
            known = [x for action in self._actions if "/".join(action.option_strings) == of[1] for x in action.choices or ()]
        hints = [suggestion(name, map(str, known)) for name in wrong]
        super().error(" ".join([f"{message}.", *filter(None, hints)]))


def add_options(parser: argparse.ArgumentParser, options: type[RunOptions]) -> None:
    """Adds the options of a recipe. Those that are not given are absent from the result."""
    kinds = kinds_of(options)
    for field in dataclasses.fields(options):
        about, kind = field.metadata, kinds[field.name]
        text = about["help"].replace("%", "%%")
        if field.name == "train":
            parser.add_argument("train", nargs="*", metavar="FILE", help=text, default=argparse.SUPPRESS)
            parser.add_argument("--data", nargs="+", metavar="FILE", help="the same", default=argparse.SUPPRESS)
            continue
        if "default" not in text:
            text += f" (default {field.default})"
        words = tuple(filter(None, about["choices"]))
        metavar = "FILE" if field.name in ("dev", "test", "embeddings") else "X" if kind is str else "N"
        more: dict[str, Any] = {"choices": words} if words else {"metavar": metavar}
        parser.add_argument(flag(field.name), dest=field.name, type=kind, help=text, default=argparse.SUPPRESS, **more)


def read_toml(path: str, options: type[RunOptions] | None) -> dict[str, Any]:
    """The options in a TOML file: `name = value`, with `-` or `_` between words. Paths are relative to the working directory.

    Without `options`, nothing is checked but the format.

    Raises:
        Mistake: the file is not TOML, or an option is unknown or has a value of another type.
    """
    check_file("config", path)
    try:
        values = tomllib.loads(Path(path).read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Mistake(f"--config: got {path}, which is not TOML ({error}); expected lines such as: hidden = 100") from error
    values = {name.replace("-", "_"): value for name, value in values.items()}
    if options is None:
        return values
    kinds: dict[str, type] = kinds_of(options) | {"out": str, "task": str}
    for name in values:
        if name not in kinds:
            hint = suggestion(name, kinds)
            raise Mistake(f"--config: {path}: got {name!r}; expected the name of an option of `cavs train`. {hint}".strip())
    return {name: converted(kinds[name], value, f"--config: {path}: {name}") for name, value in values.items()}
