"""`cavs inspect` for the files of all tasks: which task a file is for, and its graphs."""

from cavs._graphs.graphs import Graphs
from cavs._readers import FormatError
from cavs._readers.source import bare_suffix, read_utf8
from cavs._train.config import TrainError
from cavs._train.parallel import SEPARATORS
from cavs._train.tagged import COLUMN_SUFFIXES, read_tagged
from cavs._train.task import find_task
from cavs._train.text import GRAPHS


def guess_task(path: str) -> str:
    """The task whose files look like this one, by its name or content."""
    suffix = bare_suffix(path)
    if suffix in GRAPHS:
        return "classify"
    if suffix in COLUMN_SUFFIXES and suffix != ".tsv":
        return "tag"
    try:
        text = read_utf8(path).decode()
    except FormatError as error:
        raise TrainError(f"FILE: {error}") from error
    if text.lstrip().startswith("("):
        return "classify"
    cells = [next((line.split(s) for s in SEPARATORS if s in line), []) for line in text.splitlines() if line.strip()]
    if cells and all(len(pair) == 2 for pair in cells) and any(len(pair[0].split()) > 1 for pair in cells):
        return "nmt"
    try:
        read_tagged(path)
        return "tag"
    except (TrainError, FormatError):
        return "lm"


def read_samples(path: str, task: str) -> Graphs:
    """The graphs that a model of the task runs over. Raises a `TrainError` if the file has another format."""
    return find_task(task).graphs(path)
