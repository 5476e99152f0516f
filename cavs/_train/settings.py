"""`cavs train --config FILE`: options in a TOML file."""

import dataclasses
import os
import tomllib
import typing
from typing import Any

from cavs._graphs.suggest import suggestion
from cavs._train.config import Config, TrainError, check_file

# Options of `cavs train` that are not settings of a `Config`.
_OTHERS = {"out": str}


def read_settings(path: str) -> dict[str, Any]:
    """The options in a TOML file: `name = value`, with the names of the options, `-` or `_` between words.

    The training data are named `train`. Paths in the file are relative to the working directory, as on the command line.

    Raises:
        TrainError: the file is not TOML, or an option is unknown or has a value of another type.
    """
    check_file("config", path)
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TrainError(f"--config: got {path}, which is not TOML ({error}); expected lines such as: hidden = 100") from error
    kinds = typing.get_type_hints(Config) | _OTHERS
    given = {}
    for name, value in values.items():
        field = name.replace("-", "_")
        if field not in kinds:
            hint = suggestion(field, kinds)
            raise TrainError(f"--config: {path}: got {name!r}; expected the name of an option of `cavs train`. {hint}".strip())
        kind = kinds[field]
        right = isinstance(value, kind) or isinstance(value, int) and isinstance(0.0, kind)
        if not right or isinstance(value, bool):
            expected = next(k.__name__ for k in (typing.get_args(kind) or (kind,)) if k is not type(None))
            raise TrainError(f"--config: {path}: {name}: got {value!r}; expected a value of type {expected}.")
        given[field] = value if isinstance(value, kind) else float(value)
    return given


def with_settings(given: dict[str, Any]) -> dict[str, Any]:
    """The options of a command line with those of its `--config`, which the command line overrides."""
    path = given.pop("config", None)
    return given if path is None else read_settings(os.fspath(path)) | given


def changed(old: Config, new: Config) -> list[str]:
    """The fields that differ, as text."""
    pairs = zip(*(dataclasses.asdict(c).items() for c in (old, new)), strict=True)
    return [f"--{name.replace('_', '-')} {b} (was {a})" for (name, a), (_, b) in pairs if a != b]
