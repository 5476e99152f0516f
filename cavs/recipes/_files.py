"""The files that commands read and write: standard input, outputs, pictures, and which task a file is for."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cavs
from cavs.recipes._options import Mistake, check_file
from cavs.recipes._recipe import Recipe


def draw(out: str, recipe: Recipe, params: Any, path: str, found: dict[str, Any]) -> None:
    from matplotlib.figure import Figure  # needs no display

    draws: list[Callable[[Any], None]] = [x.draw for x in found.values() if isinstance(x, cavs.data.ConfusionMatrix)]
    draws = draws or [lambda ax: recipe.draw(ax, params, path)]
    figure = Figure(figsize=(6 * len(draws), 5.4), layout="constrained")
    for i, draw in enumerate(draws):
        draw(figure.add_subplot(1, len(draws), i + 1))
    with written(out):
        cavs.data.write_figure(figure, out)


@contextlib.contextmanager
def written(out: str) -> Iterator[None]:
    """A context that writes the file of `--out`, and whose errors name it."""
    try:
        yield
    except OSError as error:
        raise Mistake(f"--out: {out} cannot be written ({error.strerror}).", 1) from error


def guess_task(path: str) -> str:
    """The task whose files look like this one, by its name or content."""
    name = os.path.basename(path).lower().removesuffix(".gz")
    if name.endswith((".bench", ".blif")):
        return "netlists"
    if name.endswith((".ptb", ".trees", ".mrg", ".conllu", ".jsonl", ".npz")):
        return "trees"
    text = "\n".join(cavs.io.read_lines(path)).lstrip()
    if text.startswith("("):
        return "trees"
    for task, read in (("translation", cavs.io.read_pairs), ("tagging", cavs.io.read_tagged)):
        with contextlib.suppress(ValueError):
            found = read(path)
            if task == "tagging" or found[0].num_vertices > len(found[0]):  # a word and its tag is no pair of sentences
                return task
    return "language_model"


@contextlib.contextmanager
def given_file(path: str) -> Iterator[str]:
    """A context with the path of a file. Standard input (`-`) is copied to a file whose suffix fits its content."""
    if path != "-":
        check_file("file", path)
        yield path
        return
    data = sys.stdin.buffer.read()
    lines = data[: 1 << 16].decode("utf-8-sig", "replace").split("\n")
    first = next((line.lstrip() for line in lines if line.strip() and line[0] != "#"), "")  # netlists and .conllu have comments
    starts = {".jsonl": "{", ".bench": ("INPUT(", "OUTPUT("), ".blif": (".model", ".inputs")}
    suffix = next((suffix for suffix, start in starts.items() if first.startswith(start)), ".txt")
    suffix = ".conllu" if first.count("\t") == 9 else suffix
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / f"input{suffix}"
        copy.write_bytes(data)
        try:
            yield str(copy)
        except (Mistake, cavs.io.FormatError) as error:
            raise Mistake(str(error).replace(str(copy), "standard input")) from error
