"""Around a run of `cavs`: help, suggestions, tab completion, TOML files, logs, signals at start-up, and exhausted memory."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cavs
from cavs import cli
from cavs.recipes import _command, _train
from cavs.recipes._options import RunOptions
from cavs.recipes._recipe import learning_rate, optimizer
from cavs.recipes.language_model import LanguageOptions
from tests.small_run import train_run

TREE = "(3 (1 bad) (2 .))"
ROOT = Path(__file__).parents[1]


# ---- help and mistakes ----


@pytest.mark.parametrize("line, suggested", [("trian", "Did you mean train?"), ("train --epoch5 3", "Did you mean --epochs?")])
def test_misspelled_words_get_suggestions(line, suggested, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(line.split())
    assert suggested in capsys.readouterr().err


@pytest.mark.parametrize(
    "line, message",
    [
        ("train files.txt", "files.txt, which does not exist; expected the path of a file. Did you mean file.txt?"),
        ("train file.txt --schedule cosine --warmup -1", "--warmup: got -1; expected a number from 0"),
        ("train file.txt --out file.txt", "--out: got file.txt, a file; expected a folder"),
        ("train file.txt --out file.txt/run", r"file.txt/run cannot be written or read \(Not a directory\)"),
        ("predict folder file.txt", "CHECKPOINT: got folder; expected the folder of a run"),
        ("inspect folder", "FILE: got folder, a directory"),
    ],
)
def test_a_message_for_each_wrong_name_or_path(line, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.txt").write_text("(3 (1 bad) (2 .))\n" * 3)
    assert cli.main(line.split()) in (1, 2)
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1, error


@pytest.mark.parametrize(
    "name, text, task, fact",
    [
        ("a.txt", TREE, "trees", "trees"),
        ("a.jsonl", '{"children": [[], [0]]}', "trees", "sequences"),
        ("a.txt", "one|A word|B\n", "tagging", "A (1), B (1)"),
        ("a.conll", "one A\nword B\n\nmore A\n", "tagging", "A (2), B (1)"),
        ("a.txt", "one word\n", "language_model", "on 2 vertices"),
        ("a.tsv", "one word\tein Wort\n", "translation", "on 3 vertices"),
        ("a.txt", "one ||| ein Wort\nno word ||| nein\n", "translation", "graphs    2"),
    ],
)
def test_inspect_reads_the_files_of_all_tasks(name, text, task, fact, tmp_path, capsys):
    path = tmp_path / name
    path.write_text(text)
    assert _command.guess_task(str(path)) == task
    for words in ([], ["--task", task]):
        assert cli.main(["inspect", str(path), *words]) == 0
        assert fact in capsys.readouterr().out


def test_utf_16_is_named(tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(TREE.encode("utf-16"))
    (tmp_path / "b.txt").write_bytes("text".encode("utf-16-le"))
    for words in (
        ["train", "a.txt"],
        ["inspect", "a.txt"],
        ["train", "--task", "lm", "b.txt"],
        ["train", "--task", "tag", "a.txt"],
    ):
        assert cli.main([*words[:-1], str(tmp_path / words[-1])]) == 2
        assert re.search(
            r"got UTF-16 text; expected UTF-8. Write: iconv -f UTF-16 -t UTF-8 \S+/[ab].txt", capsys.readouterr().err
        )


@pytest.mark.parametrize(
    "name, environment, command",
    [
        ("/x/bin/cavs", {"UV_RUN_RECURSION_DEPTH": "1"}, "uv run cavs"),
        ("/x/cavs/__main__.py", {"PATH": str(Path(sys.executable).parent)}, f"{Path(sys.executable).name} -m cavs"),
        ("/x/bin/pytest", {}, "cavs"),
    ],
)
def test_commands_are_suggested_as_the_user_started_cavs(name, environment, command, monkeypatch):
    for variable in ("UV", "UV_RUN_RECURSION_DEPTH"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(sys, "argv", [name])
    assert cli.program() == command


# ---- settings ----


def test_a_toml_file_has_options_and_the_command_line_overrides_them(tmp_path, monkeypatch):
    (tmp_path / "my.toml").write_text(
        "\ufeffhidden = 7\nlr = 1\nweight-decay = 0.5\nsave_every = 3\n"
        'memory = 0.5\ntask = "lm"\nout = "here"\ntrain = "t.txt"\n'
    )
    seen = []
    monkeypatch.setattr(_command, "train", lambda *args: seen.append(args) or 0)
    assert cli.main(["train", "--config", str(tmp_path / "my.toml"), "--hidden", "9"]) == 0
    ((kind, options, out, resume, _),) = seen
    assert (kind.name, out, resume) == ("language_model", "here", None)
    assert options == LanguageOptions(
        train=(os.path.abspath("t.txt"),), hidden=9, lr=1.0, weight_decay=0.5, save_every=3, memory="0.5"
    )
    assert type(options.lr) is float


@pytest.mark.parametrize(
    "text, words, task, files",
    [
        ('train = "t.txt"', ["--data", "d.txt"], "trees", ["d.txt"]),
        ('train = ["t.txt"]', ["d.txt", "--data", "e.txt"], "trees", ["e.txt", "d.txt"]),
        ('train = ["a.bench", "b.blif.gz"]', [], "netlists", ["a.bench", "b.blif.gz"]),
    ],
)
def test_training_files_of_a_toml_file_are_those_of_the_command_line(text, words, task, files, tmp_path, monkeypatch):
    """Those of the command line replace them, and a netlist is one in both."""
    (tmp_path / "my.toml").write_text(text)
    monkeypatch.setattr(_command, "train", lambda kind, options, *_: seen.append((kind.name, options.train)) or 0)
    seen: list[object] = []
    assert cli.main(["train", "--config", str(tmp_path / "my.toml"), *words]) == 0
    assert seen == [(task, tuple(map(os.path.abspath, files)))]


def test_an_empty_path_is_refused(capsys):
    """As a shell passes a variable that is not set: a tenth of the training data would be held out."""
    assert cli.main(["train", "t.txt", "--dev", ""]) == 2
    assert "--dev: got an empty path; expected the path of a file. Omit it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, message",
    [
        ("hiden = 3", r"got 'hiden'; expected the name of an option of `cavs train`. Did you mean hidden\?"),
        ('hidden = "3"', "hidden: got '3'; expected a value of type int"),
        ("hidden = true", "hidden: got True; expected a value of type int"),
        ("hidden", "which is not TOML"),
        ("max-steps = 1\nmax_steps = 2", "got 'max_steps' and 'max-steps'; expected each option once"),
    ],
)
def test_a_wrong_toml_file_is_refused(text, message, tmp_path, capsys):
    (tmp_path / "my.toml").write_text(text)
    assert cli.main(["train", "--task", "lm", "--config", str(tmp_path / "my.toml")]) == 2
    assert re.search(f"--config: .*my.toml.*{message}", capsys.readouterr().err)


def test_a_default_in_a_subclass_keeps_the_help_and_the_limits_of_the_option():
    @dataclasses.dataclass(frozen=True)
    class Options(LanguageOptions):
        hidden: int = 7

    assert Options().hidden == 7 and Options().checked() == Options()
    with pytest.raises(cavs.recipes.Mistake, match="--hidden: got 0; expected a number from 1 to"):
        Options(hidden=0).checked()
    field, base = (next(f for f in dataclasses.fields(of) if f.name == "hidden") for of in (Options, LanguageOptions))
    assert field.metadata == base.metadata


def test_an_abbreviated_option_is_that_option(capsys):
    assert cli.main(["train", "--res", "nowhere"]) == 2
    assert "--resume: got nowhere; expected the folder of a run" in capsys.readouterr().err


def test_resuming_takes_what_may_change_and_names_what_may_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = train_run(tmp_path)
    kind, file = _command.find_recipe("trees"), str(tmp_path / "t.jsonl")
    changes = {"lr": 0.5, "dropout": 0.0, "schedule": "cosine", "max_steps": 9, "clip": 1.0, "weight_decay": 0.0}
    before = _train.saved(run, kind, {})
    options = _train.saved(run, kind, changes | {"train": ("t.jsonl",), "hidden": 4})
    assert options == type(before)(**{**before.__dict__, **changes}) and options.train == (file,)
    with pytest.raises(cavs.recipes.Mistake, match="got --hidden, --test, which cannot change: all but --epochs, .*evaluate"):
        _train.saved(run, kind, {"hidden": 6, "lr": 1.0, "test": "x.txt"})


# ---- the optimiser ----


def test_the_state_of_the_optimiser_has_the_same_structure_whatever_may_change():
    params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2), "words": jnp.ones((3, 2))}
    for name in ("adam", "adamw", "adagrad", "sgd"):
        options = [
            RunOptions(optimizer=name, weight_decay=w, clip=c, embedding_lr=e, schedule=s, warmup=n)
            for w, c, e, s, n in ((0.0, 0.0, None, "constant", 0), (0.1, 5.0, 0.0, "cosine", 3))
        ]
        states = [optimizer(of, 9).init(params) for of in options]
        assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])


@pytest.mark.parametrize("name", ["adam", "adamw", "adagrad", "sgd"])
def test_updates_are_those_of_optax_and_words_have_a_rate_of_their_own(name):
    params = {"w": jnp.arange(4.0).reshape(2, 2), "b": jnp.ones(2), "words": jnp.ones((3, 2))}
    grads = jax.tree.map(lambda x: jnp.cos(x + 1), params)
    matrices = {"w": True, "b": False, "words": False}
    decay = optax.masked(optax.add_decayed_weights(0.1), matrices)
    plain = {
        "adam": optax.chain(decay, optax.adam(0.5)),
        "adamw": optax.adamw(0.5, weight_decay=0.1, mask=matrices),
        "adagrad": optax.chain(decay, optax.adagrad(0.5, 0.0, 1e-10)),
        "sgd": optax.chain(decay, optax.sgd(0.5)),
    }[name]
    mine = optimizer(RunOptions(optimizer=name, lr=0.5, weight_decay=0.1, clip=0.0, embedding_lr=0.125), 9)
    states = [rule.init(params) for rule in (mine, plain)]
    for _ in range(3):
        (got, states[0]), (want, states[1]) = (r.update(grads, s, params) for r, s in zip((mine, plain), states, strict=True))
        np.testing.assert_allclose(got["words"], want["words"] / 4, rtol=1e-6)
        for leaf in "wb":
            np.testing.assert_allclose(got[leaf], want[leaf], rtol=1e-6)


def test_the_learning_rate_rises_and_falls():
    of = lambda **how: [float(learning_rate(RunOptions(lr=2.0, **how), 12)(n)) / 2 for n in range(12)]  # noqa: E731
    np.testing.assert_allclose(of(schedule="linear", warmup=2), [0.5, 1, *(1 - np.arange(10) / 10)], rtol=1e-6)
    np.testing.assert_allclose(of(schedule="cosine"), (1 + np.cos(np.pi * np.arange(12) / 12)) / 2, rtol=1e-5)
    np.testing.assert_allclose(of(warmup=4), [0.25, 0.5, 0.75, *[1] * 9])
    assert of() == [1.0] * 12


# ---- logs, memory, signals ----


def test_out_of_memory_says_what_to_lower(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1000000 bytes.")

    monkeypatch.setattr(_train.Run, "initial", fail)
    (tmp_path / "t.txt").write_text("(3 (1 bad) (2 .))\n" * 3)
    code = cli.main(["train", str(tmp_path / "t.txt"), "--out", str(tmp_path / "run"), "--batch", "2"])
    advice = "out of memory. Lower --batch (now 2) or --hidden (now 100), or write --memory 0.8"
    assert code == 1 and advice in capsys.readouterr().err


def test_an_interrupt_at_start_up_ends_with_code_130(tmp_path):
    # Whatever runs may catch a KeyboardInterrupt; the signal must end the program all the same.
    code = """
import os, signal
from cavs import cli
with cli.exit_on_interrupt():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        pass
    while True:
        pass
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=60).returncode == 130
    command = [sys.executable, "-X", "importtime", "-m", "cavs", "train", "--out", "run"]
    for module in (b"numpy._core.multiarray", b"jax._src.core"):  # just imported
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe)
        assert process.stderr and any(module in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) and process.returncode == 130


def test_a_platform_that_jax_lacks_is_named() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "tpu"}
    done = subprocess.run([sys.executable, "-m", "cavs", "train"], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "cavs train: JAX_PLATFORMS: got 'tpu', on which JAX cannot start here; expected a platform" in done.stderr
