"""Around a run of `cavs`: help, suggestions, tab completion, TOML files, logs, signals at start-up, and exhausted memory."""

import io
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from rich.console import Console

from cavs import cli
from cavs._cli import start
from cavs._cli.completion import script
from cavs._cli.options import build_parser
from cavs._train import report, run as runs
from cavs._train.config import Config, TrainError
from cavs._train.loop import Progress
from cavs._train.samples import guess_task
from cavs._train.settings import read_settings, with_settings
from cavs._train.task import configure, find_task

TREE = "(3 (1 bad) (2 .))"
ROOT = Path(__file__).parents[1]


# ---- help and mistakes ----


def test_the_command_alone_prints_its_help(capsys):
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert all(f"\n    {name} " in out for name in ("train", "predict", "evaluate", "inspect"))


@pytest.mark.parametrize(
    "line, suggested",
    [
        ("trian", "Did you mean train?"),
        ("train --epoch5 3", "Did you mean --epochs?"),
        ("train --optimizer adamq", "Did you mean adam"),
        ("predict a b --vertexes", "Did you mean --vertices?"),
    ],
)
def test_misspelled_words_get_suggestions(line, suggested, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(line.split())
    assert suggested in capsys.readouterr().err


@pytest.mark.parametrize(
    "line, message",
    [
        ("train --task tga FILE", "Did you mean tag?"),
        ("train files.txt", "files.txt, which does not exist; expected the path of a file. Did you mean file.txt?"),
        ("train file.txt --program tree-lstm", "Did you mean nary-tree-lstm?"),
        ("train file.txt --schedule cosine --warmup -1", "--warmup: got -1; expected a number >= 0"),
        ("train folder", "FILE: got .*folder, a directory; expected the path of a file"),
        ("train file.txt --out file.txt", "--out: the folder file.txt cannot be created"),
        ("train file.txt --out file.txt/run", "--out: the folder file.txt/run cannot be created"),
        ("train --resume file.txt", "--resume: got file.txt; expected the folder of a run"),
        ("predict folder file.txt", "CHECKPOINT: got folder; expected the folder of a run"),
        ("evaluate folder file.txt", "CHECKPOINT: got folder; expected the folder of a run"),
        ("inspect folder", "FILE: got folder, a directory"),
        ("inspect file.txt --out folder", "--out: got folder; expected a name that ends in .png, .pdf or .svg"),
        ("train --config folder", "--config: got folder, a directory"),
    ],
)
def test_a_message_for_each_wrong_name_or_path(line, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.txt").write_text("(3 (1 bad) (2 .))\n" * 3)
    assert cli.main(line.split()) in (1, 2)
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1, error


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    "words, expected",
    [
        ("cavs ev", ["evaluate"]),
        ("cavs train --warm", ["--warmup"]),
        ("cavs predict --ver", ["--vertices"]),
        ("cavs completion ba", ["bash"]),
        ("cavs inspect pypro", ["pyproject.toml"]),
    ],
)
def test_bash_completes_commands_options_and_files(words, expected):
    code = f"""{script(build_parser(), "bash")}
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _cavs; printf '%s\\n' "${{COMPREPLY[@]}}" """
    done = subprocess.run(["bash", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected


@pytest.mark.parametrize(
    "name, text, task, fact",
    [
        ("a.txt", TREE, "classify", "trees"),
        ("a.jsonl", '{"children": [[], [0]]}', "classify", "sequences"),
        ("a.txt", "one|A word|B\n", "tag", "A (1), B (1)"),
        ("a.conll", "one A\nword B\n\nmore A\n", "tag", "A (2), B (1)"),
        ("a.txt", "one word\n", "lm", "on 3 vertices"),
        ("a.tsv", "one word\tein Wort\n", "nmt", "on 3 vertices"),
        ("a.txt", "one ||| ein Wort\nno word ||| nein\n", "nmt", "graphs    2"),
    ],
)
def test_inspect_reads_the_files_of_all_tasks(name, text, task, fact, tmp_path, capsys):
    path = tmp_path / name
    path.write_text(text)
    assert guess_task(str(path)) == task
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


def test_completion_is_printed_for_each_shell(capsys):
    for shell, line in (("bash", "complete -o filenames -F _cavs cavs"), ("zsh", "bashcompinit"), ("fish", "-l epochs")):
        assert cli.main(["completion", shell]) == 0
        assert line in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, environment, command",
    [
        ("/x/bin/cavs", {"UV_RUN_RECURSION_DEPTH": "1"}, "uv run cavs"),
        ("/x/cavs/__main__.py", {"PATH": str(Path(sys.executable).parent)}, f"{Path(sys.executable).name} -m cavs"),
        ("/x/cavs/__main__.py", {"PATH": ""}, f"{sys.executable} -m cavs"),
        ("/x/bin/pytest", {}, "cavs"),
        ("./bin/cavs", {"PATH": ""}, "bin/cavs"),
    ],
)
def test_commands_are_suggested_as_the_user_started_cavs(name, environment, command, monkeypatch):
    for variable in ("UV", "UV_RUN_RECURSION_DEPTH"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(sys, "argv", [name])
    assert start.program() == command


# ---- settings ----


def test_a_toml_file_has_options_and_the_command_line_overrides_them(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text('hidden = 7\nlr = 1\nweight-decay = 0.5\nsave_every = 3\ntask = "lm"\nout = "here"\n')
    given = with_settings({"config": str(path), "hidden": 9, "train": "t.txt"})
    assert given == {
        "hidden": 9,
        "lr": 1.0,
        "weight_decay": 0.5,
        "save_every": 3,
        "task": "lm",
        "out": "here",
        "train": "t.txt",
    }
    assert type(given["lr"]) is float


@pytest.mark.parametrize(
    "text, message",
    [
        ("hiden = 3", r"got 'hiden'; expected the name of an option of `cavs train`. Did you mean hidden\?"),
        ('hidden = "3"', "hidden: got '3'; expected a value of type int"),
        ("hidden = true", "hidden: got True; expected a value of type int"),
        ("hidden", "which is not TOML"),
    ],
)
def test_a_wrong_toml_file_is_refused(text, message, tmp_path):
    (tmp_path / "my.toml").write_text(text)
    with pytest.raises(TrainError, match=message):
        read_settings(str(tmp_path / "my.toml"))


def test_resuming_takes_what_may_change_and_names_what_may_not(tmp_path, monkeypatch):
    saved = configure({"train": str(tmp_path / "t.txt"), "task": "dag", "hidden": 5})
    monkeypatch.setattr(runs.checkpoint, "read_model", lambda folder: {"config": saved.as_json()})
    (tmp_path / "model.json").touch()
    monkeypatch.chdir(tmp_path)
    changes = {"lr": 0.5, "dropout": 0.0, "schedule": "cosine", "max_steps": 9, "clip": 1.0, "weight_decay": 0.0}
    same = {"train": "t.txt", "task": "dag", "hidden": 5}
    config, folder = runs._prepare(changes | same, None, str(tmp_path))
    assert config == saved.replace(changes) and folder == tmp_path
    with pytest.raises(
        TrainError, match="got --task, --hidden, --test, which cannot change: all but --epochs, .*cavs evaluate"
    ):
        runs._prepare({"hidden": 6, "lr": 1.0, "task": "lm", "test": "x.txt"}, None, str(tmp_path))


def test_the_saved_state_has_the_same_structure_with_and_without_decay():
    from cavs._train import optimiser

    params = {"w": jax.numpy.ones((2, 2)), "b": jax.numpy.ones(2)}
    for name in ("adam", "adamw", "adagrad", "sgd"):
        states = [optimiser.dense(Config(optimizer=name, weight_decay=w)).init(params) for w in (0.0, 0.1)]
        assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])


# ---- logs, memory, signals ----


def test_a_log_gets_lines_within_long_epochs(monkeypatch):
    monkeypatch.setattr(report, "SAY_EVERY", 0.0)
    out = io.StringIO()
    step = SimpleNamespace(compiling=(2, 3))
    trainer: Any = SimpleNamespace(task=find_task("lm"), config=SimpleNamespace(epochs=4), steps=50, step=step)
    screen = report.Screen(Console(file=out, width=200), trainer)
    assert "compiling (2 of 3)" in str(report._Compiling(step).render(None))
    screen.step(Progress(epoch=1, step=7, seconds=2.0), 50, {"nll": 3.0, "count": 2.0})
    screen.epoch({"epoch": 1.14, "seconds": 2.0, "train": {"nll": 0.0, "count": 1.0}, "dev": {"nll": 0.0, "count": 1.0}}, True)
    lines = out.getvalue().splitlines()
    assert lines[0] == "epoch   2, step 7 of 50  2.0 s  loss 1.500" and lines[1].startswith("epoch 1.14 ")


def test_a_curve_has_whole_epochs_plain_numbers_and_the_best_epoch(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: (figure.canvas.draw(), figures.append(figure)))
    sums = [{"nll": x, "count": 1.0} for x in (9.0, 7.5, 7.0)]
    history = [{"epoch": i + 1, "train": s, "dev": s} for i, s in enumerate(sums)]
    report.plot(tmp_path / "curve.png", history, find_task("lm"), 2)
    (ax,) = figures[0].axes
    low, high = ax.get_xlim()
    assert {int(t) for t in ax.get_xticks() if low <= t <= high} == {1, 2, 3} and all(t == int(t) for t in ax.get_xticks())
    shown = [label.get_text() for label in ax.get_yticklabels()]
    assert "2,000" in shown and not [text for text in shown if "10^" in text or "e" in text]
    assert "best epoch: 2" in [text.get_text() for text in ax.get_legend().get_texts()]


def test_out_of_memory_says_what_to_lower(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1000000 bytes.")

    monkeypatch.setattr(runs, "begin", fail)
    (tmp_path / "t.txt").write_text("(3 (1 bad) (2 .))\n" * 3)
    code = cli.main(["train", str(tmp_path / "t.txt"), "--out", str(tmp_path / "run"), "--batch", "2"])
    advice = "out of memory. Lower --batch (now 2) or --hidden (now 100), or write --memory 0.8"
    assert code == 1 and advice in capsys.readouterr().err


def test_an_interrupt_at_start_up_ends_with_code_130(tmp_path):
    # Whatever runs may catch a KeyboardInterrupt; the signal must end the program all the same.
    code = """
import os, signal
from cavs._cli import start
with start.exit_on_interrupt():
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
