"""Small valid files of every format, and mutations of their bytes, tokens, lines and of the arrays of `.npz`."""

import contextlib
import io
import random
import re
from pathlib import Path

import numpy as np

from cavs.io import read, save_npz

SEEDS = {
    ".txt": [
        b"(3 (2 It) (4 (4 (2 's) (4 good)) (2 .)))\n(2 (2 a) (1 b))\n",
        "(2 (2 8\u00a01\\/2) (3 (2 caf\u00e9)))\n\n(0 x) (1 (2 y))\n".encode(),
        b"( (S (NP (DT The) (NN cat))\n  (VP (VBZ sits))\n  (. .)))\r\n",
        b"(1 (1 (1 (1 (1 deep)))))",
    ],
    ".conllu": [
        b"# text = They buy books\n1\tThey\tthey\tPRON\tPRP\t_\t2\tnsubj\t_\t_\n2\tbuy\tbuy\tVERB\tVBP\t_\t0\troot\t_\t_\n"
        b"3\tbooks\tbook\tNOUN\tNNS\t_\t2\tobj\t_\t_\n\n",
        "1-2\tdu\t_\t_\t_\t_\t_\t_\t_\t_\n1\tde\tde\tADP\t_\t_\t3\tcase\t_\t_\n2\tle\tle\tDET\t_\t_\t3\tdet\t_\t_\n"
        "2.1\tx\tx\tX\t_\t_\t_\t_\t_\t_\n3\ttrain\u00e9\ttrain\tNOUN\t_\t_\t0\troot\t_\t_\n\n1\ta\ta\tX\t_\t_\t0\troot\t_\t_\n".encode(),
    ],
    ".jsonl": [
        b'{"children": [[], [], [0, 1]], "inputs": ["not", "bad", null], "labels": [1, 0, 3]}\n',
        b'{"edges": [[2, 0], [2, 1]], "num_vertices": 3, "kinds": ["leaf", "leaf", "inner"]}\n'
        b'{"children": [[1], []], "kinds": ["inner", "leaf"]}\n',
        b'{"children": [[1, 1, 2], [2], []]}\n\n{"edges": [], "num_vertices": 2}\n',
    ],
    ".bench": [
        b"# c17\nINPUT(G1)\nINPUT(G2)\nINPUT(G3)\nOUTPUT(G5)\n\nG4 = nand(G1, G2)\nG5 = AND(G4, G3, G1)\nG6 = not(G5)\n",
        b"OUTPUT(y)\ny = BUFF(x)\nx = XOR(a, b)\nINPUT(a)\nINPUT(b)\n",
    ],
    ".blif": [
        b".model top\n.inputs a b \\\n c\n.outputs y\n.names a b n1\n11 1\n.names n1 c y\n1- 1\n-1 1\n.names one\n1\n.end\n",
        b".inputs a\n.outputs y z\n.names z y # a comment\n0 1\n.names a z\n1 0\n",
    ],
}
TOKENS = {
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


def npz_seed(folder: Path, suffix: str, data: bytes) -> bytes:
    path = folder / f"seed{suffix}"
    path.write_bytes(data)
    save_npz(read(path), folder / "seed.npz")
    return (folder / "seed.npz").read_bytes()


def mutated(rng: random.Random, suffix: str, seeds: list[bytes]) -> bytes:
    data = rng.choice(seeds)
    if suffix == ".npz" and rng.random() < 0.8:
        return _mutated_arrays(rng, data)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 8))):
        kind = rng.randrange(4)
        if kind == 0:
            data = mutated_bytes(rng, data, TOKENS[suffix])
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


def mutated_bytes(rng: random.Random, data: bytes, tokens: list[bytes]) -> bytes:
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
    # Random bytes seldom pass the checksums of a zip file. Here the file is valid and its arrays are not.
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
            with contextlib.suppress(ValueError, TypeError, RuntimeError, OverflowError):  # text and dates are not numbers
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
