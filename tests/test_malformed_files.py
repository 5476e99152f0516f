"""The error for a malformed file names the line, what was read there, and what was expected."""

import gzip
import pickle

import numpy as np
import pytest

import cavs
from cavs._readers import npz, source
from cavs.io import FormatError
from tests.sample_files import SST, write


def word(n, head, form="w", label="X"):
    return f"{n}\t{form}\t_\t{label}\t_\t_\t{head}\tdep\t_\t_\n"


MALFORMED = [
    # name, content, line, what was read, what was expected
    ("a.txt", "(2 w)\nword (2 w)", 2, "'word", "a tree, which starts with '\\('"),
    ("a.txt", "(2 w)\n\n(2 w))", 3, r"'\)\)'", "a '\\(' for each '\\)'"),
    ("a.txt", "(2 w) )(", 1, r"'\) \)\('", "a '\\(' for each '\\)'"),
    ("a.txt", "(2 w)\n(2 (2 w)\n(2 v)\n", 2, r"'\(2 \(2 w\)'", r"a '\)' for each '\(' of this tree \(1 missing"),
    ("a.txt", "()", 1, r"'\(\)'", "a label and a word, or children"),
    ("a.txt", "(2)", 1, r"'2\)'", "a word or children after the label"),
    ("a.txt", "(2 v w)", 1, r"'v w\)'", "a leaf has one word"),
    ("a.txt", "(2 (2 v)\nw)", 2, r"'\)'", "a vertex has a word or children, not both"),
    ("a.txt", "(2 w (2 v))", 1, r"'w \(2 v\)\)'", "a vertex has a word or children, not both"),
    ("a.txt", b"(2 w)\n(2 caf\xe9)\n", 2, r"'\\\\xe9\)", r"UTF-8 text \(invalid continuation byte\)"),
    ("a.txt", "(2 " + "w" * 1000, 1, r"'\(2 w{54}\.\.\.'", "a '\\)' for each"),
    ("a.conllu", word(1, 0) + "2\tw\n", 2, r"'2\\tw'", "ten columns separated by tabs, none of them empty"),
    ("a.conllu", word(1, 0, form=""), 1, "'1", "ten columns separated by tabs, none of them empty"),
    ("a.conllu", word(1, 0) + word(3, 1), 2, "'3", "the ID 2 in the first column"),
    ("a.conllu", word("x", 0), 1, "'x", "the ID 1 in the first column"),
    ("a.conllu", word(1, "_"), 1, "'1", "0 or the ID of a word as HEAD in column 7, not '_'"),
    ("a.conllu", word(1, "²"), 1, "'1", "0 or the ID of a word as HEAD in column 7, not '²'"),
    ("a.conllu", word(1, "9" * 5000), 1, "'1", "0 or the ID of a word as HEAD in column 7, not '9{20}'"),
    ("a.conllu", word(1, 3) + word(2, 0), 1, "'1", "a HEAD from 0 to 2"),
    ("a.conllu", word(1, 0) + "\n# c\n" + word(1, 2) + word(2, 3) + word(3, 2), 5, "'2", "word 2 depends on itself"),
    ("a.conllu", word(1, 1), 1, "'1", "word 1 depends on itself"),
    ("a.jsonl", "\n{", 2, "'{'", r"a JSON object \(Expecting property name"),
    ("a.jsonl", "[1]", 1, r"'\[1\]'", "a JSON object: {...}"),
    ("a.jsonl", "[" * 100_000, 1, r"'\[{57}\.\.\.'", r"a JSON object \(maximum recursion depth"),
    ("a.jsonl", '{"children": [' + "9" * 5000 + "]}", 1, "'{", "a JSON object"),
    ("a.jsonl", '{"children": [[]], "label": 1, "label": 2}', 1, "'{", "each key once, not 'label' again"),
    ("a.jsonl", '{"children": [[]], "x": {"a": [1], "a": [2]}}', 1, "'{", "each key once, not 'a' again"),
    ("a.jsonl", '{"children": [[]], "words": []}', 1, "'{", "only the keys children, edges, .*, not 'words'"),
    ("a.jsonl", '{"inputs": []}', 1, "'{", "either 'children', or 'edges' with 'num_vertices'"),
    ("a.jsonl", '{"children": [[]], "edges": []}', 1, "'{", "either 'children', or 'edges' with 'num_vertices'"),
    ("a.jsonl", '{"edges": []}', 1, "'{", "either 'children', or 'edges' with 'num_vertices'"),
    ("a.jsonl", '{"children": []}', 1, "'{", "at least one list"),
    ("a.jsonl", '{"children": [[true], []]}', 1, "'{", "a list of lists of integers"),
    ("a.jsonl", '{"children": [[1.0], []]}', 1, "'{", "a list of lists of integers"),
    ("a.jsonl", '{"children": [[1], {}]}', 1, "'{", "a list of lists of integers"),
    ("a.jsonl", '{"children": [[]]}\n{"children": [[2], []]}', 2, "'{", "vertex numbers from 0 to 1"),
    ("a.jsonl", '{"children": [[-1], []]}', 1, "'{", "vertex numbers from 0 to 1"),
    ("a.jsonl", '{"children": [[1180591620717411303424], []]}', 1, "'{", "vertex numbers from 0 to 1"),
    ("a.jsonl", '{"children": [[]]}\n\n{"children": [[1], [2], [1]]}', 3, "'{", "vertex [12] depends on itself"),
    ("a.jsonl", '{"edges": [[0, 1, 2]], "num_vertices": 3}', 1, "'{", r"pairs \[parent, child\]"),
    ("a.jsonl", '{"edges": [[0, 1]], "num_vertices": 1}', 1, "'{", "vertex numbers from 0 to 0"),
    ("a.jsonl", '{"edges": [], "num_vertices": 0}', 1, "'{", "an integer from 1 to 1000"),
    ("a.jsonl", '{"edges": [], "num_vertices": true}', 1, "'{", "an integer from 1 to 1000"),
    ("a.jsonl", '{"edges": [], "num_vertices": 1000000000}', 1, "'{", "an integer from 1 to 1000"),
    ("a.jsonl", '{"children": [[]], "labels": [1, 2]}', 1, "'{", "'labels' to be a list of 1 value"),
    ("a.jsonl", '{"children": [[]], "labels": "x"}', 1, "'{", "'labels' to be a list of 1 value"),
    ("a.jsonl", '{"children": [[]], "labels": [-1]}', 1, "'{", "'labels' to be only int or str .* null, not the integer -1"),
    ("a.jsonl", '{"children": [[]], "labels": [4294967296]}', 1, "'{", "not the integer 4294967296"),
    ("a.jsonl", '{"children": [[]], "labels": [true]}', 1, "'{", "not bool"),
    ("a.jsonl", '{"children": [[]], "kinds": [null]}', 1, "'{", "'kinds' to be only int or str .*, not null"),
    ("a.jsonl", '{"children": [[], []], "inputs": [1, "a"]}', 1, "'{", "not int and str"),
    (
        "a.jsonl",
        '{"children": [[]], "inputs": [1]}\n{"children": [[]], "inputs": ["a"]}',
        2,
        "'{",
        "only int or str .*, not int and str",
    ),
    (
        "a.jsonl",
        '{"children": [[]], "inputs": [1]}\n{"children": [[]]}',
        2,
        "'{",
        "'inputs' on every line or on none; the first has it",
    ),
    (
        "a.jsonl",
        '{"children": [[]]}\n{"children": [[]], "inputs": [1]}',
        2,
        "'{",
        "on every line or on none; the first lacks it",
    ),
    ("a.bench", "INPUT(a)\nb", 2, "'b'", r"INPUT\(a\), OUTPUT\(y\), y = GATE\(a, b\)"),
    ("a.bench", "INPUT(a, b)", 1, "'INPUT", r"INPUT\(a\), OUTPUT\(y\)"),
    ("a.bench", "AND(a, b)", 1, "'AND", r"INPUT\(a\), OUTPUT\(y\)"),
    ("a.bench", "INPUT(a)\ny = AND(a,)", 2, "'y = ", "signal names in brackets, separated by commas"),
    ("a.bench", "INPUT(a)\ny = AND(a a)", 2, "'y = ", "signal names in brackets, separated by commas"),
    ("a.bench", "INPUT(a)\ny = NAN(a)", 2, "'y = ", "one of the gates AND, NAND, OR"),
    ("a.bench", "INPUT(a)\ny = INPUT(a)", 2, "'y = ", "one of the gates AND, NAND, OR"),
    ("a.bench", "INPUT(a)\ny = NOT(a, a)", 2, "'y = ", "one signal in the brackets of NOT"),
    ("a.bench", "INPUT(a)\ny = dff(a)", 2, "'y = dff", "only flat, combinational netlists can be read"),
    ("a.bench", "INPUT(a)\n\na = NOT(a)", 3, "'a'", "each signal to be defined once; line 1 also defines it"),
    ("a.bench", "INPUT(a)\ny = AND(a, b)", 2, "'b'", "a signal that is an input or the output of a gate"),
    ("a.bench", "INPUT(a)\nOUTPUT(b)", 2, "'b'", "a signal that is an input or the output of a gate"),
    ("a.bench", "INPUT(a)\nx = NOT(z)\ny = AND(a, z)\nz = OR(a, y)", 4, "'z'", r"does not depend on itself \(a cycle\)"),
    ("a.blif", ".inputs a\n.latch a b", 2, "'.latch a b'", "only flat, combinational netlists can be read"),
    ("a.blif", ".inputs a\n.subckt m a=b", 2, "'.subckt", "only flat, combinational netlists can be read"),
    ("a.bench", "INPUT(a)\ny = LUT 0x8 (a)", 2, "'y = LUT", "a truth table of 2\\*\\*n bits for n signals"),
    ("a.bench", "INPUT(a)\ny = AND 0x8 (a)", 2, "'y = AND", "y = LUT 0x8"),
    ("a.bench", "INPUT(a)\ny = one", 2, "'y = one", "y = vdd or y = gnd"),
    ("a.blif", ".inputs a\n.exdc 3", 2, "'.exdc 3'", "one of .model, .inputs, .outputs, .names, .end"),
    ("a.blif", ".model a\n.model b", 2, "'.model b'", "one .model per file"),
    ("a.blif", ".inputs a\n.end\n.names x", 3, "'.names x'", "nothing after .end"),
    ("a.blif", ".inputs a\n.names", 2, "'.names'", "the gate's output after .names"),
    ("a.blif", ".inputs a\n11 1", 2, "'11 1'", ".names before the rows of its cover"),
    ("a.blif", ".inputs a b\n.names a b \\\n y\n1 1", 4, "'1 1'", "a row of the cover: 2 of 0, 1 and -, then 0 or 1"),
    ("a.blif", ".inputs a\n.names a y\n2 1", 3, "'2 1'", "a row of the cover: 1 of 0, 1 and -"),
    ("a.blif", ".inputs a\n.names a y\n1 -", 3, "'1 -'", "a row of the cover: 1 of 0, 1 and -"),
    ("a.blif", ".inputs a\n.names y\n1 1", 3, "'1 1'", "only 0 or 1, as this gate has no fan-in"),
    ("a.blif", ".inputs a\n.names a y\n1 1\n0 0", 2, "'1 1 0 0'", "all rows of y to end in 1, or all to end in 0"),
    ("a.blif", ".inputs a \\\n a", 1, "'a'", "each signal to be defined once; line 1"),
    ("a.blif", ".inputs a\n.outputs b", 2, "'b'", "a signal that is an input or the output of a gate"),
    ("a.blif", ".inputs a\n.names a z y\n11 1\n.names y z\n1 1\n.outputs y", 2, "'y'", "does not depend on itself"),
    ("a.blif", ".inputs a\n.outputs \\", 2, "'.outputs '", "a line after the .* that continues this one"),
]


@pytest.mark.parametrize("name, text, line, got, expected", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_file_is_refused_with_its_line(tmp_path, name, text, line, got, expected):
    for suffix in ("", ".gz"):
        path = write(tmp_path, name + suffix, text)
        with pytest.raises(FormatError, match=f"line {line}: got {got}.*; expected .*{expected}") as caught:
            cavs.read(path)
        assert str(caught.value).startswith(f"{path}, line ") and len(str(caught.value)) < 500
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # as a worker process does


@pytest.mark.parametrize("name", ["a.bench", "a.blif"])
def test_a_netlist_has_a_vertex(tmp_path, name):
    with pytest.raises(FormatError, match="no input and no gate.*expected at least one"):
        cavs.read(write(tmp_path, name, "# nothing\n"))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"children": np.array([5])}, "child 5 of vertex 1 of graph 0"),
        ({"children": np.array([1])}, "a cycle in graph 0"),
        ({"children": np.array([2**32])}, "children"),
        ({"children": np.array([0.0])}, "children: got dtype float64"),
        ({"children": None}, "children: got no array"),
        ({"children": np.array([{}], object)}, "a whole .npz file"),
        ({"vertex_offsets": np.array([0, 2**62, 3])}, "vertex_offsets: got invalid offsets"),
        ({"child_offsets": np.array([0, 2, -1, 1])}, "child_offsets: got invalid offsets"),
        ({"label": np.array([0])}, "label: got 1 value; expected 3"),
        ({"input_id": np.array([0, 0, 9])}, "input_id: got 9 at vertex 0 of graph 1"),
        ({"vocab.lengths": np.array([1, -1, 2])}, "vocab.lengths: got invalid lengths"),
        ({"vocab.bytes": np.array([65, 255], np.uint8)}, "can't decode byte 0xff"),
        ({"cavs_version": np.int64(99)}, "version 1 of what cavs.io.save_npz writes"),
        ({"cavs_version": None}, "no cavs_version"),
    ],
)
def test_npz_is_not_trusted(tmp_path, change, message):
    path = tmp_path / "a.npz"
    cavs.io.save_npz(cavs.Graphs.build([2, 1], [0, 1, 0], [0], input_id=[0, 1, 1], vocab=["a", "b"]), path)
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files} | change
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(FormatError, match=message) as caught:
        cavs.io.load_npz(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("suffix", [".txt", ".npz"])
def test_damaged_files_are_refused(tmp_path, suffix):
    write(tmp_path, "a.txt", SST)
    cavs.io.save_npz(cavs.read(tmp_path / "a.txt"), tmp_path / "a.npz")
    whole = gzip.compress((tmp_path / f"a{suffix}").read_bytes())
    for data in (b"", whole[:-9], whole[:20], whole[:30] + bytes(8) + whole[38:], b"(2 w)", whole + b"more"):
        if data:  # an empty file is an empty gzip file
            (tmp_path / f"b{suffix}.gz").write_bytes(data)
            with pytest.raises(FormatError, match="expected a whole gzip file, as the name ends in .gz"):
                cavs.read(tmp_path / f"b{suffix}.gz")
    for data in (b"", b"PK", (tmp_path / "a.npz").read_bytes()[:-50], b"\x93NUMPY"):
        (tmp_path / "b.npz").write_bytes(data)
        with pytest.raises(FormatError, match="expected a whole .npz file"):
            cavs.read(tmp_path / "b.npz")


def test_files_that_would_fill_the_memory_are_refused(tmp_path, monkeypatch):
    for module in (source, npz):
        monkeypatch.setattr(module, "ALLOWANCE", 1 << 12)
        monkeypatch.setattr(module, "RATIO", 10)
    text = "(2 w)\n" * 2_000
    assert len(cavs.read(write(tmp_path, "a.txt", text))) == 2_000
    path = write(tmp_path, "a.txt.gz", text)
    assert path.stat().st_size < len(text) / 100
    with pytest.raises(
        FormatError, match="a.txt.gz: got '.* bytes of gzip that decompress to more'; expected at most 4096 bytes"
    ):
        cavs.read(path)
    monkeypatch.setattr(source, "ALLOWANCE", len(text))
    assert len(cavs.read(path)) == 2_000  # exactly the limit
    np.savez_compressed(tmp_path / "a.npz", children=np.zeros(10**6, int))
    with pytest.raises(FormatError, match="a.npz: got a file with an error .* bytes that decompress to 8000128"):
        cavs.read(tmp_path / "a.npz")
