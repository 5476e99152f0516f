"""Trees in brackets, the format of the Stanford Sentiment Treebank and of the Penn Treebank."""

import contextlib
import errno
import os
import re
import warnings
from collections.abc import Iterable
from itertools import compress

import numpy as np

from cavs._graphs.checks import check_bool
from cavs._graphs.files import read_whole
from cavs._graphs.flat import children_of_parents, number_names
from cavs._graphs.graphs import Graphs
from cavs._readers.npz import graphs_from_bytes, graphs_to_bytes, has_stamp
from cavs._readers.source import FormatError, Path, format_error, line_at, read_utf8, utf8_of_lines, write_bytes


def read_trees(source: Path | Iterable[str], *, cache: bool = False) -> Graphs:
    """Reads trees in brackets: `(label word)` is a leaf, `(label child child ...)` is an inner vertex.

    An inner vertex has one or more children, each in brackets. Before a child, the label may be omitted, as in the Penn
    Treebank: `( (S ...))`. A tree may span several lines, and a line may hold several trees. Brackets and ASCII white space
    separate labels and words; all other characters, such as a no-break space, are part of them. The text is UTF-8, and a
    file without trees gives no graphs.

    Vertices are numbered in post-order: children before parents, from left to right, the root last. `input_id` is the word
    of a leaf, in `vocab` in the order of first appearance, and -1 at inner vertices. If all labels are integers of at most
    nine digits, `label` holds these integers and `label_names` is `None`. Otherwise `label` is an index into `label_names`,
    which are in the order of first appearance. An omitted label is -1.

    Each file gets its own vocabulary. `with_vocab` gives a development or test set the word ids of the training set:

    ```python
    train = cavs.read_trees("train.txt")
    dev = cavs.read_trees("dev.txt").with_vocab(train.vocab)
    ```

    Args:
        source: the path of a file, which is decompressed if its name ends in `.gz`; or a file opened as text; or any
            iterable of lines, such as `["(3 (2 good) (2 .))"]`.
        cache: if `True`, stores the graphs in `<source>.npz`, and reads that file instead as long as the size and the
            modification time of `source` do not change. A cache of another version is replaced. If it cannot be written, or
            that file is another one, such as of [`cavs.io.save_npz`][], which is never replaced, a warning is issued.

    Returns:
        The graphs, one per tree.

    Raises:
        FormatError: there is text outside brackets, a vertex has neither a word nor children, or both, or two words, a
            bracket is unmatched, or the file is not UTF-8. The message names the line.
        TypeError: `source` is neither a path nor an iterable of `str`, or `cache` no bool.
        ValueError: `cache=True`, and `source` is not a path.
    """
    check_bool("read_trees: cache", cache)
    if not isinstance(source, str | os.PathLike):
        if cache:
            raise ValueError(
                f"read_trees: cache: got True for {type(source).__name__}; expected a path, beside which the cache is stored. "
                "Write cache=False."
            )
        return _parse(*utf8_of_lines(source))
    if str(source).lstrip()[:1] == "(" and not os.path.exists(source):
        raise FileNotFoundError(errno.ENOENT, "no such file; for a tree as text write cavs.read_trees([text])", str(source))
    if not cache:
        return _parse(source, read_utf8(source))
    # Before reading: if the file changes meanwhile, the cache is out of date.
    stat = os.stat(source)
    stamp = (stat.st_size, stat.st_mtime_ns)
    cached = f"{os.fspath(source)}.npz"
    with contextlib.suppress(OSError, FormatError):
        return graphs_from_bytes(cached, read_whole(cached), stamp)
    graphs = _parse(source, read_utf8(source))
    try:
        if os.path.exists(cached) and not has_stamp(read_whole(cached)):
            raise FileExistsError(errno.EEXIST, "a file that is no cache, or a damaged one, has its name", cached)
        write_bytes(cached, graphs_to_bytes(graphs, stamp))
    except OSError as error:
        cure = "Rename or delete that" if isinstance(error, FileExistsError | IsADirectoryError) else "Make the folder writable"
        warnings.warn(f"read_trees: no cache was written ({error}). {cure}, or write cache=False.", stacklevel=2)
    return graphs


def _parse(path: Path, data: bytes) -> Graphs:
    # Arrays with one element per token (bracket, label or word): no loop over vertices, and no recursion.
    characters = np.frombuffer(data, np.uint8)
    opening, closing = characters == ord("("), characters == ord(")")
    inside = ~(opening | closing | (characters == ord(" ")) | ((characters >= 9) & (characters <= 13)))
    starts = inside.copy()
    starts[1:] &= ~inside[:-1]
    positions = np.flatnonzero(opening | closing | starts)
    opening, closing = opening[positions], closing[positions]
    atom = ~(opening | closing)
    label = atom & _after(opening)
    word = atom & _after(label)
    opened, closed = np.cumsum(opening), np.cumsum(closing)
    depth = opened - closed
    if broken := _broken_rule(opening, closing, label, word, depth):
        token, shown, expected = broken
        start = int(positions[shown])
        got = data[start : start + 300].split(b"\n")[0].rstrip()
        raise format_error(path, line_at(data, int(positions[token])), got, expected)

    # Opening brackets are vertices in pre-order, closing ones are vertices in post-order. Among the brackets of one depth,
    # the k-th opening bracket matches the k-th closing bracket.
    close_depth = depth[closing] + 1
    by_depth = np.argsort(close_depth, kind="stable")
    post_order = np.empty(len(by_depth), np.int64)
    post_order[np.argsort(depth[opening], kind="stable")] = by_depth
    # The parent of a vertex is the next vertex to close at a depth smaller by one.
    num_rows = len(close_depth)
    rows = np.arange(num_rows)
    key = close_depth * num_rows + rows
    parents = by_depth[np.minimum(np.searchsorted(key[by_depth], key - num_rows), max(num_rows - 1, 0))]
    parents[close_depth == 1] = -1
    num_vertices = np.diff(np.flatnonzero(close_depth == 1), prepend=-1)

    atoms = data.translate(bytes.maketrans(b"()", b"  ")).split()
    label_ids, label_names = number_names(list(compress(atoms, label[atom].tolist())))
    labels = np.full(num_rows, -1, np.int32)
    integers = all(re.fullmatch(rb"[0-9]{1,9}", name) for name in label_names)
    if integers and label_names:
        label_ids = np.array([int(name) for name in label_names], np.int32)[label_ids]
    labels[post_order[opened[label] - 1]] = label_ids
    word_ids, words = number_names(list(compress(atoms, word[atom].tolist())))
    inputs = np.full(num_rows, -1, np.int32)
    inputs[closed[word]] = word_ids  # the bracket after a word closes its leaf

    num_children, children = children_of_parents(num_vertices, parents)
    return Graphs.build(
        num_vertices,
        num_children,
        children,
        label=labels,
        label_names=None if integers else [name.decode() for name in label_names],
        input_id=inputs,
        vocab=[name.decode() for name in words],
    )


def _after(mask: np.ndarray) -> np.ndarray:
    return np.append(False, mask)[:-1]


def _broken_rule(
    opening: np.ndarray, closing: np.ndarray, label: np.ndarray, word: np.ndarray, depth: np.ndarray
) -> tuple[int, int, str] | None:
    """Checks which tokens may follow each other, by masks over the tokens.

    Returns the first token that breaks a rule, the token at which the text to show begins, and what was expected.
    """
    atom = ~(opening | closing)
    rules = (
        (closing & (depth < 0), "a '(' for each ')'"),
        (atom & (depth <= 0), "a tree, which starts with '('"),
        (closing & _after(opening), "a label and a word, or children, between '(' and ')'"),
        (closing & _after(label), "a word or children after the label, before ')'"),
        (atom & _after(closing), "another child in brackets or ')': a vertex has a word or children, not both"),
        (atom & _after(word), "')' after a leaf's word; a leaf has one word"),
        (opening & _after(word), "')' after a leaf's word; a vertex has a word or children, not both"),
    )
    if broken := [(int(np.argmax(mask)), expected) for mask, expected in rules if mask.any()]:
        token, expected = min(broken)
        # The token before explains the rule, unless the text is outside of all trees.
        return token, token if atom[token] and depth[token] <= 0 else max(token - 1, 0), expected
    if len(depth) and depth[-1] > 0:
        token = int(np.flatnonzero(opening & (depth == 1))[-1])
        return token, token, f"a ')' for each '(' of this tree ({depth[-1]} missing at the end of the file)"
    return None
