"""What all formats share: the choice by suffix, compression, empty files, and mutated files."""

import os

import pytest

import cavs
from cavs.io import write_edges
from tests.fuzz_readers import fuzz
from tests.sample_files import GOOD, write


@pytest.mark.parametrize("suffix", GOOD)
def test_read_goes_by_suffix_with_and_without_gz(tmp_path, suffix):
    plain = cavs.read(write(tmp_path, "a" + suffix, GOOD[suffix]))
    for name, text in (
        ("A" + suffix.upper(), GOOD[suffix]),
        ("b" + suffix + ".gz", GOOD[suffix]),
        ("c" + suffix, "\ufeff" + GOOD[suffix]),
    ):
        again = cavs.read(str(write(tmp_path, name, text)))
        assert again.children.tolist() == plain.children.tolist() and again.num_vertices == plain.num_vertices > 1
    cavs.io.save_npz(plain, tmp_path / "a.npz.gz")
    assert cavs.read(tmp_path / "a.npz.gz").children.tolist() == plain.children.tolist()


@pytest.mark.parametrize("name", ["a.csv", "a", "a.gz", "a.txt.bz2"])
def test_read_lists_the_suffixes_it_knows(tmp_path, name):
    with pytest.raises(ValueError, match=r"expected one of \.txt, .*\.conllu, \.jsonl, \.bench, \.blif, \.npz"):
        cavs.read(tmp_path / name)


@pytest.mark.parametrize("space", ["\u00a0", "\u2003", "\u2028", "\u0085", "\u3000", "\x1c", "\x1f", "\ufeff"])
def test_unicode_space_stays_inside_a_word(tmp_path, space):
    word = f"8{space}1\\/2"
    assert cavs.read_trees(write(tmp_path, "a.txt", f"(2 (2 {word}) (3 x))")).vocab == (word, "x")
    line = f"1\t{word}\t_\tX\t_\t_\t0\troot\t_\t_\n"
    assert cavs.io.read_conllu(write(tmp_path, "a.conllu", line)).vocab == (word,)
    blif = f".inputs {word}\n.outputs y\n.names {word} y\n1 1\n"
    assert cavs.io.read_netlist(write(tmp_path, "a.blif", blif)).num_edges == 1
    bench = f"INPUT({word})\ny = NOT({word})\n"
    assert cavs.io.read_netlist(write(tmp_path, "a.bench", bench)).num_edges == 1


def test_several_files_are_read_as_one(tmp_path):
    both = cavs.read([write(tmp_path, "a.txt", "(1 (x b) (x c))"), write(tmp_path, "b.txt", "(x (1 d) (x b))")])
    assert both.vocab == ("b", "c", "d") and both.input_id.tolist() == [0, 1, -1, 2, 0, -1]
    assert [both.label_names[i] for i in both.label] == ["x", "x", "1", "1", "x", "x"]


@pytest.mark.parametrize("name", ["a.txt", "a.conllu", "a.jsonl"])
@pytest.mark.parametrize("text", ["", "\n", " \r\n\n"])
def test_a_file_without_graphs_gives_none(tmp_path, name, text):
    graphs = cavs.read(write(tmp_path, name, text))
    assert len(graphs) == graphs.num_vertices == graphs.num_edges == 0
    write_edges(graphs, tmp_path / "b.jsonl")
    cavs.io.save_npz(graphs, tmp_path / "b.npz")
    assert len(cavs.read(tmp_path / "b.jsonl")) == len(cavs.read(tmp_path / "b.npz")) == 0


def test_labels_that_are_booleans_are_written_as_numbers(tmp_path):
    write_edges(cavs.from_lengths([2], label=[True, False], graph_label=[True]), tmp_path / "b.jsonl")
    again = cavs.read(tmp_path / "b.jsonl")
    assert again.label.tolist() == [1, 0] and again.graph_label.tolist() == [1]


def test_a_missing_file_is_an_os_error(tmp_path):
    for suffix in (*GOOD, ".npz", ".txt.gz"):
        with pytest.raises(FileNotFoundError):
            cavs.read(tmp_path / f"none{suffix}")


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    write_edges(cavs.from_lengths([2]), path)
    before = path.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", _no_space)
        with pytest.raises(OSError, match="no space"):
            write_edges(cavs.from_lengths([3]), path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def _no_space(*_):
    raise OSError("no space")


def test_fuzzed_files_give_graphs_or_format_errors():
    counts = fuzz(seed=1, inputs=600)
    assert all(counts[suffix] > 0 and counts[f"{suffix} valid"] > 0 for suffix in (".txt", ".conllu", ".jsonl", ".npz"))
