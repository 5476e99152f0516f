"""Fuzzes every reader: `python tests/fuzz_readers.py --seconds 300`.

Small valid files are mutated (bytes, tokens, lines, splices, arrays of `.npz`) and read. A reader may return graphs or
raise `FormatError` that names the file; anything else fails and prints what reproduces it. Graphs that come back are
checked field by field, and trees against a parser that knows nothing but a stack.
"""

import argparse
import contextlib
import gzip
import io
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from cavs._graphs import Graphs
from cavs._readers import FormatError, load_npz, read, read_conllu, save_npz, write_edges

_TREES = [
    b"(3 (2 It) (4 (4 (2 's) (4 good)) (2 .)))\n(2 (2 a) (1 b))\n",
    "(2 (2 8\u00a01\\/2) (3 (2 caf\u00e9)))\n\n(0 x) (1 (2 y))\n".encode(),
    b"( (S (NP (DT The) (NN cat))\n  (VP (VBZ sits))\n  (. .)))\r\n",
    b"(1 (1 (1 (1 (1 deep)))))",
]
_CONLLU = [
    b"# text = They buy books\n1\tThey\tthey\tPRON\tPRP\t_\t2\tnsubj\t_\t_\n2\tbuy\tbuy\tVERB\tVBP\t_\t0\troot\t_\t_\n"
    b"3\tbooks\tbook\tNOUN\tNNS\t_\t2\tobj\t_\t_\n\n",
    "1-2\tdu\t_\t_\t_\t_\t_\t_\t_\t_\n1\tde\tde\tADP\t_\t_\t3\tcase\t_\t_\n2\tle\tle\tDET\t_\t_\t3\tdet\t_\t_\n"
    "2.1\tx\tx\tX\t_\t_\t_\t_\t_\t_\n3\ttrain\u00e9\ttrain\tNOUN\t_\t_\t0\troot\t_\t_\n\n1\ta\ta\tX\t_\t_\t0\troot\t_\t_\n".encode(),
]
_JSONL = [
    b'{"children": [[], [], [0, 1]], "inputs": ["not", "bad", null], "labels": [1, 0, 3]}\n',
    b'{"edges": [[2, 0], [2, 1]], "num_vertices": 3, "kinds": ["leaf", "leaf", "inner"]}\n'
    b'{"children": [[1], []], "kinds": ["inner", "leaf"]}\n',
    b'{"children": [[1, 1, 2], [2], []]}\n\n{"edges": [], "num_vertices": 2}\n',
]
_BENCH = [
    b"# c17\nINPUT(G1)\nINPUT(G2)\nINPUT(G3)\nOUTPUT(G5)\n\nG4 = nand(G1, G2)\nG5 = AND(G4, G3, G1)\nG6 = not(G5)\n",
    b"OUTPUT(y)\ny = BUFF(x)\nx = XOR(a, b)\nINPUT(a)\nINPUT(b)\n",
]
_BLIF = [
    b".model top\n.inputs a b \\\n c\n.outputs y\n.names a b n1\n11 1\n.names n1 c y\n1- 1\n-1 1\n.names one\n1\n.end\n",
    b".inputs a\n.outputs y z\n.names z y # a comment\n0 1\n.names a z\n1 0\n",
]
_TOKENS = {
    ".txt": [
        b"(",
        b")",
        b"()",
        b" ",
        b"\n",
        b"(2 ",
        b"(2 w)",
        b"x",
        b"\xc2\xa0",
        b"\xe2\x80\xa8",
        b"\x0b",
        b"-1",
        b"9999999999",
    ],
    ".conllu": [b"\t", b"\n", b"\n\n", b"_", b"0", b"3", b"7", b"1-2\t", b"1.1\t", b"#", b"\xc2\xb2", b"9" * 5000, b"\r", b" "],
    ".jsonl": [
        *(b"[", b"]", b"{", b"}", b"[[", b"]]", b",", b":", b"null", b"true", b"1.5", b"-1", b"1e9", b"NaN", b"4294967296"),
        *(b'"labels"', b'"edges"', b'"children"', b'"num_vertices"', b'"\\ud800"', b"\n", b"9" * 5000, b"[" * 5000, b'"a"'),
    ],
    ".bench": [b"INPUT(", b"OUTPUT(", b")", b"(", b",", b"=", b" = DFF(", b" = and(", b"G1", b"G5", b"#", b"\n", b"NOT"],
    ".blif": [
        *(
            b".names ",
            b".latch ",
            b".inputs ",
            b".outputs ",
            b".end",
            b".model",
            b".exdc",
            b"\\\n",
            b"\\",
            b"1 1\n",
            b"-",
            b"\n",
        ),
        *(b"a", b"y", b"#", b"0"),
    ],
    ".npz": [b"PK", b"\x93NUMPY", b"\x00" * 8, b"\xff" * 8, b"<i8", b"|O"],
}


def fuzz(seconds: float, seed: int) -> Counter[str]:
    """Mutates and reads until the time is over; how many inputs each format had, and how many of them were valid."""
    rng = random.Random(seed)
    corpus = {".txt": _TREES, ".conllu": _CONLLU, ".jsonl": _JSONL, ".bench": _BENCH, ".blif": _BLIF}
    counts: Counter[str] = Counter()
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        corpus[".npz"] = [_npz_seed(Path(folder), suffix, data) for suffix in (".jsonl", ".blif") for data in corpus[suffix]]
        suffixes = list(corpus)
        while time.monotonic() < end:
            suffix = rng.choice(suffixes)
            data = _mutated(rng, suffix, corpus[suffix])
            counts[suffix] += 1
            path = Path(folder) / f"fuzz{suffix}"
            if rng.random() < 0.05:
                path = Path(folder) / f"fuzz{suffix}.gz"
                data = gzip.compress(data, 1)
                if rng.random() < 0.5:
                    data = _mutated_bytes(rng, data, [b"\x00"])
            path.write_bytes(data)
            reader: Callable[[Path], Graphs] = read
            if suffix == ".conllu" and rng.random() < 0.5:
                reader = _read_deprel
            began = time.monotonic()
            try:
                try:
                    graphs = reader(path)
                except FormatError as error:
                    assert str(path) in str(error) and len(str(error)) < 2000, f"message: {str(error)[:2000]}"
                    graphs = None
                if graphs is not None:
                    _check(graphs)
                    counts[f"{suffix} valid"] += 1
                    if rng.random() < 0.1:
                        _check_round_trips(graphs, Path(folder))
                if suffix == ".txt" and path.suffix != ".gz":
                    _check_trees(data, graphs)
                assert time.monotonic() - began < 10, "took over 10 seconds"
            except Exception as error:
                shown = repr(data) if len(data) < 4000 else f"{data[:4000]!r}... ({len(data)} bytes)"
                raise AssertionError(f"seed {seed}, input {counts.total()}, {path.name}: {shown}") from error
    return counts


def _read_deprel(path: Path) -> Graphs:
    return read_conllu(path, label="deprel")


def _npz_seed(folder: Path, suffix: str, data: bytes) -> bytes:
    path = folder / f"seed{suffix}"
    path.write_bytes(data)
    save_npz(read(path), folder / "seed.npz")
    return (folder / "seed.npz").read_bytes()


def _mutated(rng: random.Random, suffix: str, seeds: list[bytes]) -> bytes:
    data = rng.choice(seeds)
    if suffix == ".npz" and rng.random() < 0.8:
        return _mutated_arrays(rng, data)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 8))):
        kind = rng.randrange(4)
        if kind == 0:
            data = _mutated_bytes(rng, data, _TOKENS[suffix])
        elif kind == 1:
            data = _mutated_tokens(rng, data)
        elif kind == 2:
            lines = data.split(b"\n")
            i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
            lines[i : i + rng.randrange(2)] = lines[j : j + rng.randrange(3)]
            data = b"\n".join(lines)
        else:
            other = rng.choice(seeds)
            data = data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]
    return data


def _mutated_bytes(rng: random.Random, data: bytes, tokens: list[bytes]) -> bytes:
    i = rng.randrange(len(data) + 1)
    j = min(len(data), i + rng.choice((0, 1, 1, 4, 30)))
    kind = rng.randrange(5)
    if kind == 0:
        return data[:i] + data[j:]
    if kind == 1:
        return data[:i] + bytes([rng.randrange(256)]) + data[j:]
    if kind == 2:
        return data[:i] + data[i:j] * rng.choice((2, 2, 50)) + data[j:]
    if kind == 3:
        return data[:i]
    return data[:i] + rng.choice(tokens) + data[j:]


def _mutated_tokens(rng: random.Random, data: bytes) -> bytes:
    tokens = re.findall(rb"[A-Za-z0-9_]+|[^A-Za-z0-9_]", data) or [b""]
    i, j = rng.randrange(len(tokens)), rng.randrange(len(tokens))
    if rng.random() < 0.5:
        tokens[i], tokens[j] = tokens[j], tokens[i]
    else:
        tokens[i] = tokens[j]
    return b"".join(tokens)


def _mutated_arrays(rng: random.Random, data: bytes) -> bytes:
    # Bytes changed at random seldom pass a zip file's checksums: here the file is whole and its arrays are wrong.
    with np.load(io.BytesIO(data)) as file:
        arrays = {name: file[name] for name in file.files}
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        name = rng.choice(list(arrays))
        array = arrays[name]
        kind = rng.randrange(7)
        if kind == 0:
            del arrays[name]
            if not arrays:
                break
        elif kind == 1:
            with contextlib.suppress(ValueError, TypeError, RuntimeError, OverflowError):  # text and dates are no numbers
                arrays[name] = array.astype(rng.choice(("i1", "u1", "i4", "u8", "i8", "f8", "U3", "?", "M8[s]", "S4")))
        elif kind == 2:
            arrays[name] = array.reshape(rng.choice(((-1,), (1, -1), (-1, 1))))
        elif kind == 3:
            arrays[name] = array[: rng.randrange(len(array) + 1)] if array.ndim else array[None]
        elif kind == 4 and array.size:
            array = array.copy()
            value = rng.choice((-(2**63), -2, -1, 0, 1, 2, 3, 200, 2**31, 2**62, 2**63 - 1, rng.randrange(8)))
            np.put(array, rng.randrange(array.size), np.array(value).astype(array.dtype))
            arrays[name] = array
        elif kind == 5:
            arrays[name] = arrays[rng.choice(list(arrays))]
        else:
            arrays[rng.choice(("kind", "label", "input_id", "vocab.bytes", "vocab.lengths", "kind_names.lengths"))] = array
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def _check(graphs: Graphs) -> None:
    """What every `Graphs` promises, by plain loops."""
    assert graphs.vertex_offsets[0] == 0 and graphs.child_offsets[0] == 0
    assert graphs.vertex_offsets[-1] == len(graphs.height) == len(graphs.child_offsets) - 1
    assert graphs.child_offsets[-1] == len(graphs.children)
    ids = ((graphs.kind, graphs.kind_names, 0), (graphs.label, graphs.label_names, -1), (graphs.input_id, graphs.vocab, -1))
    for values, names, low in ids:
        if values is not None:
            assert len(values) == len(graphs.height) and values.dtype == np.int32
            high = 2**31 - 1 if names is None else len(names) - 1
            assert all(low <= value <= high for value in values.tolist())
        assert names is None or len(set(names)) == len(names) and all(type(name) is str for name in names)
    for g in range(len(graphs)):
        start, stop = graphs.vertex_offsets[g : g + 2].tolist()
        assert stop > start
        for row in range(start, stop):
            kids = graphs.children[graphs.child_offsets[row] : graphs.child_offsets[row + 1]].tolist()
            assert all(0 <= kid < stop - start for kid in kids)
            assert graphs.height[row] == max((graphs.height[start + kid] + 1 for kid in kids), default=0)


def _check_round_trips(graphs: Graphs, folder: Path) -> None:
    save_npz(graphs, folder / "again.npz")
    write_edges(graphs, folder / "again.jsonl")
    for again in (load_npz(folder / "again.npz"), read(folder / "again.jsonl")):
        assert again.vertex_offsets.tolist() == graphs.vertex_offsets.tolist()
        assert again.child_offsets.tolist() == graphs.child_offsets.tolist()
        assert again.children.tolist() == graphs.children.tolist()


def _check_trees(data: bytes, graphs: Graphs | None) -> None:
    try:
        expected = plain_trees(data)
    except ValueError as error:
        assert graphs is None, f"read_trees took what the plain parser refuses: {error}"
        return
    assert graphs is not None, "read_trees refused what the plain parser takes"
    start = graphs.vertex_offsets.tolist()
    assert len(graphs) == len(expected)
    for g, tree in enumerate(expected):
        assert start[g + 1] - start[g] == len(tree)
        for row, (label, word, kids) in enumerate(tree, start=start[g]):
            assert graphs.children[graphs.child_offsets[row] : graphs.child_offsets[row + 1]].tolist() == kids
            assert (None if graphs.input_id[row] < 0 else graphs.vocab[graphs.input_id[row]]) == word
            number = int(graphs.label[row])
            if graphs.label_names is None or label is None:
                assert number == (-1 if label is None else int(label))
            else:
                assert graphs.label_names[number] == label


def plain_trees(data: bytes) -> list[list[tuple[str | None, str | None, list[int]]]]:
    """Per tree, per vertex in post-order: label, word, children. The definition that `read_trees` is held against."""
    text = data.decode("utf-8").removeprefix("\ufeff")
    trees: list[list[tuple[str | None, str | None, list[int]]]] = []
    stack: list[tuple[list[str], list[int]]] = []  # of each open bracket: what it holds, its children so far
    for token in re.findall(r"[()]|[^() \t\n\r\v\f]+", text):
        if token == "(":
            if not stack:
                trees.append([])
            elif len(stack[-1][0]) > 1:
                raise ValueError("a child after a word")
            stack.append(([], []))
        elif not stack:
            raise ValueError("outside brackets")
        elif token == ")":
            atoms, kids = stack.pop()
            if len(atoms) + bool(kids) < (1 if kids else 2):
                raise ValueError("neither word nor children")
            trees[-1].append((atoms[0] if atoms else None, atoms[1] if len(atoms) > 1 else None, kids))
            if stack:
                stack[-1][1].append(len(trees[-1]) - 1)
        elif stack[-1][1] or len(stack[-1][0]) > 1:
            raise ValueError("a word after a child or a word")
        else:
            stack[-1][0].append(token)
    if stack:
        raise ValueError("a bracket stays open")
    return trees


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    result = fuzz(arguments.seconds, arguments.seed)
    total = sum(count for name, count in result.items() if not name.endswith("valid"))
    print(f"{total} inputs, seed {arguments.seed}: only graphs and FormatError")
    for name in sorted(result):
        print(f"  {name}: {result[name]}")
