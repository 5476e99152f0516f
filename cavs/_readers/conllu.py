"""CoNLL-U, the format of Universal Dependencies: dependency trees."""

import re

import numpy as np

from cavs._graphs.flat import children_of_parents, number_names
from cavs._graphs.graphs import Graphs
from cavs._readers.source import ASCII_SPACE, FormatError, Path, build_acyclic, format_error, read_lines

_LABEL_COLUMNS = {"upos": 3, "xpos": 4, "deprel": 7}
_SKIPPED_ID = re.compile(r"[0-9]+[-.][0-9]+")


def read_conllu(path: Path, *, label: str = "upos") -> Graphs:
    """Dependency trees: a graph a sentence, a vertex a word, in the order of the sentence.

    A word line has ten columns with a tab between: ID FORM LEMMA UPOS XPOS FEATS HEAD DEPREL DEPS MISC. IDs run 1, 2, ...;
    lines of multiword tokens (`3-4`) and empty nodes (`3.1`) are passed over, as are comments (`#`). Blank lines end
    sentences. A word's children are the words whose HEAD it is, left to right; HEAD 0 is a root, of which there may be
    several. UTF-8, `.gz` by name; a file without sentences gives no graphs.

    `input_id` is the word's FORM, in `vocab` by first appearance; `label` the chosen column, in `label_names` by first
    appearance, -1 where it is `_`.

    **Arguments:** `label` is "upos", "xpos" or "deprel".

    **Raises:** `FormatError` that names the line: not ten columns or an empty one, an ID out of turn, a HEAD that is no
    word of the sentence; for heads that form a cycle (so there is no root), the line of a word on it.
    """
    if label not in _LABEL_COLUMNS:
        raise ValueError(f"read_conllu: label={label!r}, wanted one of {', '.join(map(repr, _LABEL_COLUMNS))}.")
    column = _LABEL_COLUMNS[label]
    lines = read_lines(path)
    words: list[str] = []
    labels: list[str] = []
    heads: list[int] = []  # 0 is a root, else within the sentence
    where: list[int] = []  # the index of each word's line
    num_vertices: list[int] = []
    n = 0  # words of the sentence so far
    lines.append("")  # ends the last sentence
    for i, line in enumerate(lines):
        if line.startswith("#"):
            continue
        if not line.strip(ASCII_SPACE):
            if n:
                for k in range(len(heads) - n, len(heads)):
                    if heads[k] > n:
                        raise format_error(path, where[k] + 1, lines[where[k]], f"a HEAD from 0 to {n}, the last word's ID")
                num_vertices.append(n)
                n = 0
            continue
        cells = line.split("\t")
        if len(cells) != 10 or "" in cells:
            raise format_error(path, i + 1, line, "ten columns with a tab between, none empty")
        if cells[0] != str(n + 1):
            if _SKIPPED_ID.fullmatch(cells[0]):
                continue
            raise format_error(path, i + 1, line, f"the ID {n + 1} in the first column (or a range 3-4, or 3.1)")
        head = cells[6]
        # Not `isdigit` alone: it takes "²". Nine digits are enough for any sentence.
        if not (head.isascii() and head.isdigit() and len(head) < 10):
            raise format_error(path, i + 1, line, f"a HEAD, 0 or a word's ID, in column 7, not {head[:20]!r}")
        n += 1
        words.append(cells[1])
        labels.append(cells[column])
        heads.append(int(head))
        where.append(i)

    sizes = np.array(num_vertices, np.int64)
    starts = np.cumsum(sizes) - sizes
    local = np.array(heads, np.int64)
    parents = np.where(local > 0, local - 1 + np.repeat(starts, sizes), -1)

    def cycle_error(graph: int, vertex: int) -> FormatError:
        i = where[int(starts[graph]) + vertex]
        return format_error(path, i + 1, lines[i], f"heads that lead to a root (HEAD 0); word {vertex + 1} depends on itself")

    word_ids, vocab = number_names(words)
    given = np.array([text != "_" for text in labels], bool)
    label_ids = np.full(len(labels), -1, np.int32)
    label_ids[given], label_names = number_names([text for text in labels if text != "_"])
    num_children, children = children_of_parents(sizes, parents)
    return build_acyclic(
        sizes,
        num_children,
        children,
        cycle_error,
        label=label_ids,
        label_names=label_names,
        input_id=word_ids,
        vocab=vocab,
    )
