"""The options of a recipe: a dataclass, which becomes a command line, and is read from TOML and JSON."""

import argparse
import dataclasses
import difflib
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Self

LARGEST = 2**31 - 1
# The options that `--resume` may change. The others determine the data, the model, or the order of the batches.
RESUMABLE = (
    *("epochs", "max_steps", "patience", "save_every", "memory", "devices", "tune", "log"),
    *("lr", "embedding_lr", "schedule", "warmup", "weight_decay", "clip", "dropout"),
)
PATHS = ("dev", "test", "embeddings")  # and `train`, which is a tuple


class Mistake(ValueError):
    """A mistake of the user: the command prints its text without a traceback, and exits with `code`."""

    def __init__(self, text: str, code: int = 2):
        super().__init__(text)
        self.code = code


def option(
    default: Any, help: str, *, least: float | None = None, most: float = LARGEST, choices: tuple[str | None, ...] = ()
) -> Any:
    """Declares a field of `RunOptions`. To change only the default in a subclass, write `hidden: int = 256`.

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
    vocab_size: int = option(0, "the most words with <unk> and the like: the most frequent ones; 0: all", least=0)
    batch: int = option(20, "graphs, sentences or pairs per step", least=1)
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

    def __init_subclass__(cls) -> None:
        for name, field in cls.__dataclass_fields__.items():
            if name in vars(cls) and not isinstance(vars(cls)[name], dataclasses.Field):  # a default alone
                setattr(cls, name, dataclasses.field(default=vars(cls)[name], metadata=field.metadata))

    def checked(self) -> Self:
        """Returns the options, with absolute paths. Raises a `Mistake` that names the flag if a value is out of range."""
        for field in dataclasses.fields(self):
            name, value, about = flag(field.name), getattr(self, field.name), field.metadata
            if about["choices"] and value not in about["choices"]:
                raise Mistake(f"{name}: got {value!r}; expected one of {', '.join(filter(None, about['choices']))}.")
            least, most = about["least"], about["most"]
            if value is not None and least is not None and not least <= value <= most:
                raise Mistake(f"{name}: got {value!r}; expected a number from {least:g} to {most:g}.")
        if empty := [name for name in PATHS if getattr(self, name, None) == ""] or ["train"] * ("" in self.train):
            raise Mistake(f"{flag(empty[0])}: got an empty path; expected the path of a file. Omit it for none.")
        # A run may be resumed from another directory.
        paths = {name: os.path.abspath(path) for name in PATHS if (path := getattr(self, name, None))}
        return dataclasses.replace(self, train=tuple(map(os.path.abspath, self.train)), **paths)

    def files(self) -> list[str]:
        """Returns the paths of all files of data."""
        return [*self.train, *(path for name in PATHS if (path := getattr(self, name, None)))]

    def as_json(self) -> dict[str, Any]:
        """The options as a dict for JSON."""
        return dataclasses.asdict(self) | {"train": [*self.train]}

    @classmethod
    def from_json(cls, values: object, where: str = "options") -> Self:
        """Restores and checks what `as_json` returned. Raises a `Mistake` that names the field.

        Options of `RESUMABLE` may be missing, as an earlier version may have had fewer: they take their defaults.
        """
        kinds = kinds_of(cls)
        if not isinstance(values, dict) or not kinds.keys() - {*RESUMABLE} <= values.keys() <= kinds.keys():
            raise Mistake(f"{where}: got {values!r:.60}; expected a dict of the options {', '.join(kinds)}.")
        return cls(**converted(values, kinds, where)).checked()


def kinds_of(options: type[RunOptions]) -> dict[str, type]:
    """The type of each option: `str`, `int`, `float`, or `tuple` of paths; without `None`."""
    hints = typing.get_type_hints(options).items()
    plain = {name: typing.get_args(hint)[0] if isinstance(hint, types.UnionType) else hint for name, hint in hints}
    return {name: typing.get_origin(hint) or hint for name, hint in plain.items()}


def converted(values: Mapping[str, Any], kinds: Mapping[str, type], where: str) -> dict[str, Any]:
    """Converts values of TOML or JSON to the types of options. Raises a `Mistake` for an unknown option or another type."""
    options = {}
    for name, value in values.items():
        if name not in kinds:
            hint = suggestion(name, kinds)
            raise Mistake(f"{where}: got {name!r}; expected the name of an option of `cavs train`. {hint}".strip())
        kind = kinds[name]
        if value is None or type(value) is kind:
            options[name] = value
        elif (kind is float and type(value) is int) or (kind is str and type(value) in (int, float)):  # memory = 0.5
            options[name] = kind(value)
        elif kind is tuple and isinstance(value, str | list) and all(isinstance(x, str) for x in value):
            options[name] = (value,) if isinstance(value, str) else tuple(value)
        else:
            expected = "str" if kind is tuple else kind.__name__
            raise Mistake(f"{where}: {name}: got {value!r}; expected a value of type {expected}.")
    return options


def flag(name: str, part: bool = False) -> str:
    """Returns an option as the user writes it: `FILE` or `--name`; or with `part`, where that part of the data is from."""
    if part and name == "dev":
        return "--dev, or what FILE holds out"
    return "FILE" if name in ("train", "file") else "--" + name.replace("_", "-")


def suggestion(name: str, known: Iterable[str]) -> str:
    """`Did you mean ...?`, or an empty text."""
    near = difflib.get_close_matches(name.lower(), [*known], 1, 0.6)
    return f"Did you mean {near[0]}?" if near else ""


def check_file(name: str, path: str) -> None:
    """Raises a `Mistake` if the file given as the option `name` does not exist or is not a regular file."""
    if Path(path).is_file():
        return
    fault = "a directory" if Path(path).is_dir() else "which is not a regular file" if Path(path).exists() else None
    parent = Path(path).parent
    hint = "" if fault or not parent.is_dir() else suggestion(Path(path).name, os.listdir(parent))
    raise Mistake(f"{flag(name)}: got {path}, {fault or 'which does not exist'}; expected the path of a file. {hint}".rstrip())


class Parser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` that suggests words for misspelled ones. Options that are not given are absent."""

    def __init__(self, prog: str, epilog: str = "", argument_default: Any = argparse.SUPPRESS, **how: Any):
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=prog, epilog=epilog, formatter_class=raw, argument_default=argument_default, **how)

    def error(self, message: str) -> NoReturn:
        """Prints the usage, the message, and a suggestion, and exits with code 2."""
        known = [str(word) for action in self._actions for word in (*action.option_strings, *(action.choices or ()))]
        wrong = [word for word in re.findall(r"--[\w-]+|(?<=choice: ')\S+(?=')", message) if word not in known]
        super().error(" ".join([f"{message}.", *filter(None, (suggestion(word, known) for word in wrong))]))


def add_options(parser: Parser, options: type[RunOptions]) -> None:
    kinds = kinds_of(options)
    for field in dataclasses.fields(options):
        name, kind, text = field.name, kinds[field.name], field.metadata["help"].replace("%", "%%")
        if name == "train":
            parser.add_argument("train", nargs="*", metavar="FILE", help=text)
            parser.add_argument("--data", nargs="+", metavar="FILE", help="the same")
            continue
        text += "" if "default" in text else f" (default {field.default})"
        choices = tuple(filter(None, field.metadata["choices"]))
        metavar = "FILE" if name in PATHS else "X" if kind is str else "N"
        more: dict[str, Any] = {"choices": choices} if choices else {"metavar": metavar}
        parser.add_argument(flag(name), type=kind, help=text, **more)


def read_toml(path: str) -> dict[str, Any]:
    """Reads the options in a TOML file: `name = value`, with `-` or `_` between words. Raises a `Mistake` if it is not TOML."""
    check_file("config", path)
    try:
        values = tomllib.loads(Path(path).read_text("utf-8-sig"))  # editors on Windows begin files with a byte order mark
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Mistake(f"--config: got {path}, which is not TOML ({error}); expected lines such as: hidden = 100") from error
    options: dict[str, Any] = {}
    for name, value in values.items():
        if (plain := name.replace("-", "_")) in options:
            raise Mistake(f"--config: {path}: got {plain!r} and {plain.replace('_', '-')!r}; expected each option once.")
        options[plain] = value
    return options
