"""Penn s-expressions, the format of the Stanford Sentiment Treebank and of the Penn Treebank."""

import os
import re
import warnings
from itertools import compress

import numpy as np

from cavs._graphs.flat import children_of_parents, number_names
from cavs._graphs.graphs import Graphs
from cavs._readers.files import read_whole
from cavs._readers.npz import graphs_from_bytes, graphs_to_bytes
from cavs._readers.source import FormatError, Path, format_error, line_at, read_utf8, write_bytes


def read_trees(path: Path, *, cache: bool = False) -> Graphs:
    """Trees in brackets: `(label word)` is a leaf, `(label child child ...)` an inner vertex, each child in brackets.

    A vertex has any number of children, one too. The label may be left out before a child, as the Penn Treebank does:
    `( (S ...))`. Trees stand one a line, several a line or over several lines. Labels and words are what stands between
    brackets and ASCII white space; any other character, a no-break space too, is part of them. The text is UTF-8, a name
    that ends in `.gz` is decompressed, and a file without trees gives no graphs.

    Vertices are numbered in post-order: children before parents, left first, root last. `input_id` is the word of a leaf,
    in `vocab` by first appearance, and -1 at inner vertices. Where all labels are integers (of at most nine digits)
    `label` holds them and `label_names` is `None`; otherwise it indexes `label_names`, by first appearance in the text.
    It is -1 where the label was left out.

    **Arguments:** `cache=True` keeps what was read in `<path>.npz` and uses that file as long as size and time of
    modification of `path` stay. A cache that is damaged or of another version is written anew; where it cannot be
    written, a warning says so.

    **Raises:** `FormatError` that names the line, for text outside brackets, a vertex with neither word nor children or
    with both, a second word, a bracket without its partner, or bytes that are not UTF-8.
    """
    if not cache:
        return _parse(path, read_utf8(path))
    # Taken before reading: should the file change meanwhile, the cache will look old rather than new.
    stat = os.stat(path)
    stamp = (stat.st_size, stat.st_mtime_ns)
    cached = f"{os.fspath(path)}.npz"
    try:
        return graphs_from_bytes(cached, read_whole(cached), stamp)
    except (OSError, FormatError):
        pass
    graphs = _parse(path, read_utf8(path))
    try:
        write_bytes(cached, graphs_to_bytes(graphs, stamp))
    except OSError as error:
        warnings.warn(f"read_trees: no cache was written ({error}); write access or cache=False avoids this.", stacklevel=2)
    return graphs


def _parse(path: Path, data: bytes) -> Graphs:
    # The text is taken apart as a whole: one entry a token (bracket, label or word), no loop over vertices, no recursion.
    characters = np.frombuffer(data, np.uint8)
    opening, closing = characters == ord("("), characters == ord(")")
    inside = ~(opening | closing | (characters == ord(" ")) | ((characters >= 9) & (characters <= 13)))
    starts = inside.copy()
    starts[1:] &= ~inside[:-1]
    at = np.flatnonzero(opening | closing | starts)
    opening, closing = opening[at], closing[at]
    atom = ~(opening | closing)
    label = atom & _after(opening)
    word = atom & _after(label)
    opened, closed = np.cumsum(opening), np.cumsum(closing)
    depth = opened - closed
    _check(path, data, at, opening, closing, atom, label, word, depth)

    # A vertex is an opening bracket (in pre-order) and a closing one (in post-order). Among those of one depth the k-th
    # opening bracket belongs to the k-th closing one.
    close_depth = depth[closing] + 1
    by_depth = np.argsort(close_depth, kind="stable")
    post_order = np.empty(len(by_depth), np.int64)
    post_order[np.argsort(depth[opening], kind="stable")] = by_depth
    # The parent of the vertex that closes i-th is the next one to close one level higher up.
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
    inputs[closed[word]] = word_ids  # The bracket after a word closes its leaf.

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
    out = np.zeros_like(mask)
    out[1:] = mask[:-1]
    return out


def _check(
    path: Path,
    data: bytes,
    at: np.ndarray,
    opening: np.ndarray,
    closing: np.ndarray,
    atom: np.ndarray,
    label: np.ndarray,
    word: np.ndarray,
    depth: np.ndarray,
) -> None:
    """What may follow what, as masks over the tokens; the earliest token that breaks a rule is reported."""
    rules = (
        (closing & (depth < 0), "a '(' for each ')'"),
        (atom & (depth <= 0), "a tree, which starts with '('"),
        (closing & _after(opening), "a label and a word, or children, between '(' and ')'"),
        (closing & _after(label), "a word or children after the label, before ')'"),
        (atom & _after(closing), "another child in brackets or ')': a vertex has a word or children, not both"),
        (atom & _after(word), "')' after a leaf's word; a leaf has one word"),
        (opening & _after(word), "')' after a leaf's word; a vertex has a word or children, not both"),
    )
    broken = [(int(np.argmax(mask)), wanted) for mask, wanted in rules if mask.any()]
    if broken:
        token, wanted = min(broken)
        # Shown from the token before, which explains the rule.
        start = int(at[max(token - 1, 0)]) if token and not (atom[token] and depth[token] <= 0) else int(at[token])
        raise format_error(path, line_at(data, int(at[token])), _rest_of_line(data, start), wanted)
    if len(depth) and depth[-1] > 0:
        start = int(at[np.flatnonzero(opening & (depth == 1))[-1]])
        wanted = f"a ')' for each '(' of this tree ({depth[-1]} missing at the end of the file)"
        raise format_error(path, line_at(data, start), _rest_of_line(data, start), wanted)


def _rest_of_line(data: bytes, start: int) -> bytes:
    end = data.find(b"\n", start)
    return data[start : len(data) if end < 0 else end].rstrip()
