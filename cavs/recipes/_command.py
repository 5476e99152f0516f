"""The commands `train`, `tune`, `predict`, `evaluate` and `inspect`, for one recipe or for those that `--task` names."""

import contextlib
import functools
import importlib
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

import cavs
from cavs.recipes._options import Mistake, Parser, add_options, check_file, converted, flag, kinds_of, read_toml, suggestion
from cavs.recipes._recipe import Recipe
from cavs.recipes._report import CURVE, LOG, TEST, out_of_memory
from cavs.recipes._train import saved, train, tune

TASKS = ("trees", "tagging", "language_model", "translation", "regression", "netlists")
ALIASES = {
    **dict.fromkeys(("classify", "sentiment", "dag"), "trees"),
    **dict.fromkeys(("tag", "pos", "ner"), "tagging"),
    **{"lm": "language_model", "nmt": "translation", "regress": "regression"},
}
# Errors of the user, whose message is enough.
ERRORS = (Mistake, cavs.io.FormatError, cavs.data.KeeperError, cavs.memory.BudgetError)
# The arguments that a `ProgramError` begins with, as the user writes them.
FLAGS = {name: flag(name, part=True) for name in ("train", "dev", "test", "program", "layers")}
FLAGS["inputs"] = "--embedding-size"
FILES_OF_A_RUN = (*cavs.data.Keeper.FILES, ".lock", LOG, TEST, CURVE)
# How numbers are printed in a table, by column. JSON has all digits.
DIGITS = {"prediction": "z.6g", "probability": ".4f", "log_probability": "z.3f", "perplexity": ".2f"}  # z: no negative zero
PICTURES = (".png", ".pdf", ".svg")
LATEST = "(the latest)"  # what `--resume` without a folder means
HEARTBEAT = 20  # seconds without an answer after which a process counts as dead
MSG_DISTRIBUTED = (
    "--distributed: got {!r}; expected HOST:PORT,N,I: the address of process 0, the number of processes, and the number of "
    "this one from 0, such as --distributed node1:1234,2,0; or auto, in a cluster that JAX knows, such as Slurm."
)
FILES = """files of graphs, by the end of the name, optionally followed by .gz:
  .txt .ptb .trees .mrg  bracketed trees with a label at each vertex: (3 (2 not) (1 (1 bad) (2 .)))
  .conllu                dependency trees; the label of a word is its part of speech
  .jsonl                 any graphs: {"children": [[], [], [0, 1]], "inputs": ["a", "b", null], "labels": [0, 1, 1]}
  .bench .blif           netlists (--task netlists)
  .npz                   files written by cavs.io.save_npz
tagged sentences (--task tagging): .conllu; one word per line, blank lines between sentences; or word|TAG word|TAG
sentence pairs (--task translation): source TAB target, or source ||| target
text (--task language_model): one sentence per line
"""
EPILOGS = {
    "train": f"""examples:
  cavs train                                          a Tree-LSTM on the reviews shipped with cavs; under a minute
  cavs train train.txt --dev dev.txt --test test.txt  your own trees
  cavs train --task tagging ner.txt                   entities (O, B-PER, I-PER, ...), scored by F1
  cavs train --resume runs/reviews --epochs 40        train longer; the result is bitwise that of a run without a stop
  cavs train --config my.toml --seed 2                options from a file: train = "trees.txt", hidden = 200, ...
  cavs train --task tagging --help                    the options of a task: {", ".join(TASKS)}

Ctrl-C (or SIGTERM) stops after the current step, saves, and prints the command that resumes.

""",
    "tune": """examples:
  cavs tune --hidden 512 --batch 64                   the kernels of `cavs train --hidden 512 --batch 64`
  cavs tune --task lm sentences.txt --hidden 256

Times layouts of the persistent kernels on this GPU, for a batch of `cavs train` with the same options. Prints them, and keeps
the fastest for all later runs. Options that change neither data, model nor batches have no effect.

""",
}


def find_recipe(name: str) -> type[Recipe]:
    """The recipe of a task. Raises a `Mistake` that lists the names."""
    task = ALIASES.get(name.replace("-", "_"), name.replace("-", "_"))
    if task not in TASKS:
        names = (*TASKS, *ALIASES)
        raise Mistake(f"--task: got {name!r}; expected one of {', '.join(names)}. {suggestion(name, names)}".rstrip())
    return getattr(importlib.import_module(f"cavs.recipes.{task}"), task.title().replace("_", ""))  # such as LanguageModel


def main(kind: type[Recipe], arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line of a recipe, and ends the program: `python trees.py [train] --data FILE`, `predict RUN FILE`, ...

    Args:
        kind: the recipe.
        arguments: the command line without the program's name; `None` reads `sys.argv`.
    """
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    name = words.pop(0) if words and words[0] in COMMANDS else "train"
    sys.exit(run(name, words, kind, f"python {sys.argv[0]}"))


def run(command: str, words: list[str], kind: type[Recipe] | None, program: str) -> int:
    """Runs a command, and prints its errors in one line. Returns the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # characters that its encoding lacks are escaped, as on standard error
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return COMMANDS[command](words, kind, program)
    except cavs.vertex_programs.ProgramError as error:
        name, _, message = str(error).partition(":")
        text, code = f"{FLAGS.get(name, name)}:{message}", 2
    except ERRORS as error:
        text, code = str(error), getattr(error, "code", 2)
    except FileNotFoundError as error:
        text, code = f"{error.filename} does not exist.", 2
    except BrokenPipeError:  # `cavs predict ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        text, code = f"{error.filename or 'a file'} cannot be read or written ({error.strerror or error}).", 1
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not out_of_memory(error):
            raise
        text, code = "out of memory. Read a smaller file, or lower --batch or --hidden.", 1
    except (RuntimeError, AssertionError):
        if not (platforms := os.environ.get("JAX_PLATFORMS")) or _jax_starts():
            raise
        text = f"JAX_PLATFORMS: got {platforms!r}, on which JAX cannot start here; expected a platform of this machine"
        text, code = f"{text}. Write JAX_PLATFORMS=cpu, or pip install 'jax[cuda13]' for a GPU.", 2
    except KeyboardInterrupt:
        text, code = "interrupted", 130
    print(f"cavs {command}: {text}", file=sys.stderr)
    return code


def _jax_starts() -> bool:
    with contextlib.suppress(RuntimeError, AssertionError):
        return bool(jax.devices())
    return False


def _train(words: list[str], kind: type[Recipe] | None, program: str, command: str) -> int:
    prog = f"{program} {command}"
    shared = _shared_parser(prog)
    known, unparsed = shared.parse_known_args(words)
    for name in ("out", "resume"):
        if getattr(known, name) == "":  # as of a variable that is not set
            raise Mistake(f"--{name}: got an empty path; expected the path of a folder. Omit it for none.")
    settings = {} if known.config is None else read_toml(known.config)
    folder = None if known.resume is None else _resumed(known.resume, known.out)
    if kind is None:
        task = known.task or settings.get("task") or (cavs.data.read_run(folder).get("task") if folder else "trees")
        kind = find_recipe(str(task))
        files = settings.get("train", [])
        named = map(str, (*unparsed, *(files if isinstance(files, list) else [files])))
        if kind.name in ("trees", "regression") and any(x.removesuffix(".gz").endswith((".bench", ".blif")) for x in named):
            kind = find_recipe("netlists")
    values = converted(settings, kinds_of(kind.Options) | {"out": str, "task": str}, f"--config: {known.config}")
    out = known.out or values.get("out")
    parser = Parser(prog, EPILOGS[command] + FILES, parents=[shared])
    add_options(parser, kind.Options)
    parsed = vars(parser.parse_args(words))
    if files := (*parsed.pop("data", ()), *parsed.get("train", ())):
        parsed["train"] = files
    values = {name: x for name, x in (values | parsed).items() if name not in vars(known)}
    if known.distributed is not None:
        values["devices"] = 0
    cavs.data.keep_host_memory()
    cavs.data.compile_quickly()
    cavs.data.cache_compiled()
    with connected(known.distributed):
        options = kind.Options(**values).checked() if folder is None else saved(folder, kind, values)
        if command == "tune":
            return tune(kind, options)
        return train(kind, options, out if folder is None else None, folder, program)


def _shared_parser(prog: str) -> Parser:
    """The parser of the options of `cavs train` and `cavs tune` that do not depend on the recipe."""
    parser = Parser(prog, add_help=False, argument_default=None)
    parser.add_argument("--task", metavar="NAME", help=f"{', '.join(TASKS)} (default trees); also {', '.join(ALIASES)}")
    parser.add_argument("--config", metavar="FILE", help="read options from a TOML file; the command line overrides them")
    parser.add_argument("--out", metavar="DIR", help="folder of the checkpoints and the curve (default: a new one under runs/)")
    text = "resume a run (without DIR: the latest under runs/); takes options that change neither data, model nor batches"
    parser.add_argument("--resume", nargs="?", const=LATEST, metavar="DIR", help=text)
    text = "this is process I of N, each started with this command; HOST:PORT is that of process 0; auto: ask the cluster"
    parser.add_argument("--distributed", metavar="HOST:PORT,N,I", help=text)
    return parser


@contextlib.contextmanager
def connected(to: str | None) -> Iterator[None]:
    """A context in which JAX knows the devices of all processes of a run. It must begin before JAX is used.

    If an error ends the context, the process ends at once: JAX would wait for processes that may no longer exist. Raises a
    `Mistake` if `to` is not an address, or JAX cannot connect to it.
    """
    if to is None:
        yield
        return
    match = re.fullmatch(r"([^,]*:[^,]*),(\d+),(\d+)", to)
    if to != "auto" and (match is None or int(match[3]) >= int(match[2])):
        raise Mistake(MSG_DISTRIBUTED.format(to))
    address: Any = () if match is None else (match[1], int(match[2]), int(match[3]))
    try:
        jax.distributed.initialize(*address, heartbeat_timeout_seconds=HEARTBEAT)
    except (ValueError, RuntimeError) as error:
        raise Mistake(f"{MSG_DISTRIBUTED.format(to)} {error}") from error
    try:
        yield
    except Mistake as error:
        print(f"cavs train: {error}", file=sys.stderr, flush=True)
        os._exit(error.code)


def _resumed(resume: str, out: str | None) -> Path:
    """The folder of the run to resume: `resume`, or `out`, or the most recently trained one under `runs/`."""
    latest = max(Path("runs").glob("*/last.npz"), key=lambda path: path.stat().st_mtime, default=None)
    if (chosen := (resume != LATEST and resume) or out or latest) is None:
        raise Mistake("--resume: got no folder, and there is no run under runs/. Write --resume DIR.")
    folder = _folder_of_run("--resume", chosen)
    if out is not None and Path(out).resolve() != folder.resolve():
        raise Mistake(f"--out: got {out} with --resume {resume}; expected none, as a run continues in its own folder.")
    return folder


def _folder_of_run(argument: str, path: str | os.PathLike[str]) -> Path:
    """The folder of a run that is given, or that has the given file."""
    folder = Path(path).parent if Path(path).is_file() else Path(path)
    if not (folder / "model.json").exists():
        raise Mistake(f"{argument}: got {path}; expected the folder of a run, as `cavs train --out DIR` writes it.")
    return folder


def load_run(folder: str | os.PathLike[str], kind: type[Recipe] | None = None) -> tuple[Recipe, Any]:
    """Loads a run of `cavs train`, to predict, score, export or train further in Python.

    ```python
    recipe, params = cavs.recipes.load_run("runs/reviews")
    for line in recipe.predict(params, "new.txt", vertices=False, probabilities=True):
        print(line["label"], line["text"])
    scores = recipe.evaluate(params, "test.txt")
    ```

    Args:
        folder: the folder of the run, or a file in it.
        kind: the recipe, if it is your own; `None`: the one that `cavs train` ran.

    Returns:
        The recipe, whose `facts` hold the words and labels, and the parameters of the best epoch.

    Raises:
        Mistake: the folder holds no run, or one that this recipe does not fit, or whose parameters are not finite.
        cavs.data.KeeperError: a file is damaged.
    """
    run_folder = _folder_of_run("load_run: folder", folder)
    about, file = cavs.data.read_run(run_folder), f"{run_folder}/model.json"
    kind = find_recipe(str(about.get("task"))) if kind is None else kind
    options = kind.Options.from_json(about.get("options"), file)
    try:
        recipe = kind(options, about["facts"])
        like = jax.eval_shape(lambda: recipe.init(jax.random.key(0)))
    except Exception as error:  # inconsistent sizes may fail anywhere in a program
        raise Mistake(f"{file} does not describe a valid model ({error!r:.200}). Restore it from a copy.") from error
    params = cavs.data.restore_best(run_folder, like)
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        if jnp.issubdtype(x.dtype, jnp.inexact) and not jnp.isfinite(x).all():
            got = f"{run_folder}: got NaN or infinity in the best parameters, at {jax.tree_util.keystr(path)}"
            raise Mistake(f"{got}; expected finite numbers. Train again with a smaller --lr or --clip.")
    return recipe, params


def _predict(words: list[str], kind: type[Recipe] | None, program: str) -> int:
    parser = _parser_of_run(f"{program} predict", "write to this file instead of the terminal")
    for name, description in (
        ("vertices", "a line for every vertex or word, not only for graphs"),
        ("probabilities", "the probabilities of all labels"),
        ("no-header", "do not write the line that names the columns"),
    ):
        parser.add_argument(f"--{name}", action="store_true", default=False, help=description)
    args = parser.parse_args(words)
    if args.out is not None and all(map(os.path.exists, (args.out, args.file))) and os.path.samefile(args.out, args.file):
        raise Mistake(f"--out: got {args.out}, which is FILE; expected another file, as its samples would be replaced.")
    _check_not_of_a_run(args.out)
    recipe, params = _load(args.checkpoint, kind)
    with given_file(args.file) as path:
        rows = recipe.predict(params, path, args.vertices, args.probabilities)
        lines = (json.dumps(cavs.data.json_of(x)) for x in rows) if args.json else _table(rows, not args.no_header)
        if args.out is None:
            for line in lines:
                print(line)
            print(end="", flush=True)
        else:
            text = "".join(f"{line}\n" for line in lines)
            with written(args.out):
                cavs.data.write_text(text, args.out)
    return 0


def _check_not_of_a_run(out: str | None) -> None:
    """Raises `Mistake` if `out` would replace a file that training wrote."""
    file = None if out is None else Path(os.path.realpath(out))  # a link names the file that would be replaced
    if file is not None and file.name in FILES_OF_A_RUN and (file.parent / "model.json").exists():
        raise Mistake(f"--out: got {out}, a file of a run; expected another file, as the run would lose it.")


def _table(lines: Iterable[dict[str, Any]], header: bool) -> Iterator[str]:
    """Yields lines of cells, with tabs between them."""
    for number, line in enumerate(lines):
        probabilities = line.pop("probabilities", {})
        if header and not number:
            yield "\t".join(map(cavs.io.printable, (*line, *(f"p({label})" for label in probabilities))))
        cells = (format(x, DIGITS[name]) if name in DIGITS and isinstance(x, float) else str(x) for name, x in line.items())
        yield "\t".join(map(cavs.io.printable, (*cells, *(format(p, DIGITS["probability"]) for p in probabilities.values()))))


def _evaluate(words: list[str], kind: type[Recipe] | None, program: str) -> int:
    args = _parser_of_run(f"{program} evaluate", "write a picture of the scores (.png, .pdf, .svg)").parse_args(words)
    check_picture(args.out)
    _check_not_of_a_run(args.out)
    recipe, params = _load(args.checkpoint, kind)
    with given_file(args.file) as path:
        scores = recipe.evaluate(params, path)
        if args.out is not None:
            draw(args.out, recipe, params, path, scores)
    if args.json:
        values = {"task": recipe.name, "checkpoint": args.checkpoint, "file": args.file, **scores}
        print(json.dumps(cavs.data.json_of(values), ensure_ascii=True, indent=1, allow_nan=False))
    else:
        cavs.data.print_scores(scores, args.file)
    return 0


def _parser_of_run(prog: str, out: str) -> Parser:
    """The parser of a command that reads a run and a file; `out` is the help of `--out`."""
    parser = Parser(prog, FILES)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="the folder that cavs train wrote")
    parser.add_argument("file", metavar="FILE", help="the samples; - reads standard input")
    parser.add_argument("--json", action="store_true", default=False, help="write JSON")
    parser.add_argument("--out", metavar="FILE", default=None, help=out)
    return parser


def _load(folder: str, kind: type[Recipe] | None) -> tuple[Recipe, Any]:
    """The recipe and the best parameters of a run, for a command that ends after its work."""
    cavs.data.compile_quickly()
    cavs.data.cache_compiled()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # taking most of a GPU's memory takes 1.8 s on an H200
    return load_run(_folder_of_run("CHECKPOINT", folder), kind)


def _inspect(words: list[str], kind: type[Recipe] | None, program: str) -> int:
    parser = Parser(f"{program} inspect", FILES)
    parser.add_argument("file", metavar="FILE", help="graphs, tagged sentences, text, or sentence pairs")
    parser.add_argument("--task", metavar="NAME", default=None, help="what the file is for (default: as its content suggests)")
    parser.add_argument("--batch", type=int, metavar="N", default=64, help="graphs per batch (default 64)")
    parser.add_argument("--out", metavar="FILE", default=None, help="write a picture of the schedule (.png, .pdf, .svg)")
    args = parser.parse_args(words)
    check_file("file", args.file)
    check_picture(args.out)
    _check_not_of_a_run(args.out)
    kind = find_recipe(args.task or guess_task(args.file)) if kind is None or args.task else kind
    try:
        cavs.debug.inspect(args.file, args.batch, args.out, kind.graphs)
    except ValueError as error:
        raise Mistake(str(error)) from error
    return 0


def check_picture(out: str | None) -> None:
    """Raises a `Mistake` if the file of `--out` can be no picture, before anything is computed for it."""
    if out is not None and not Path(out).absolute().parent.is_dir():
        raise Mistake(f"--out: got {out}; expected a file in an existing folder.")
    if out is not None and (Path(out).suffix.lower() not in PICTURES or Path(out).is_dir()):
        raise Mistake(f"--out: got {out}; expected a name that ends in {', '.join(PICTURES)}.")


def draw(out: str, recipe: Recipe, params: Any, path: str, scores: dict[str, Any]) -> None:
    from matplotlib.figure import Figure  # needs no display

    draws: list[Callable[[Any], None]] = [x.draw for x in scores.values() if isinstance(x, cavs.data.ConfusionMatrix)]
    draws = draws or [lambda ax: recipe.draw(ax, params, path)]
    figure = Figure(figsize=(6 * len(draws), 5.4), layout="constrained")
    for i, draw in enumerate(draws):
        draw(figure.add_subplot(1, len(draws), i + 1))
    with written(out):
        cavs.data.write_figure(figure, out)


@contextlib.contextmanager
def written(out: str) -> Iterator[None]:
    """A context that writes the file of `--out`, and whose errors name it."""
    try:
        yield
    except OSError as error:
        raise Mistake(f"--out: {out} cannot be written ({error.strerror}).", 1) from error


def guess_task(path: str) -> str:
    """The task whose files look like this one, by its name or content."""
    name = os.path.basename(path).lower().removesuffix(".gz")
    if name.endswith((".bench", ".blif")):
        return "netlists"
    if name.endswith((".ptb", ".trees", ".mrg", ".conllu", ".jsonl", ".npz")):
        return "trees"
    text = "\n".join(cavs.io.read_lines(path)).lstrip()
    if text.startswith("("):
        return "trees"
    for task, read in (("translation", cavs.io.read_pairs), ("tagging", cavs.io.read_tagged)):
        with contextlib.suppress(ValueError):
            graphs = read(path)
            if task == "tagging" or graphs[0].num_vertices > len(graphs[0]):  # a word and its tag is no pair of sentences
                return task
    return "language_model"


@contextlib.contextmanager
def given_file(path: str) -> Iterator[str]:
    """A context with the path of a file. Standard input (`-`) is copied to a file whose suffix fits its content."""
    if path != "-":
        check_file("file", path)
        yield path
        return
    data = sys.stdin.buffer.read()
    lines = data[: 1 << 16].decode("utf-8-sig", "replace").split("\n")
    first = next((line.lstrip() for line in lines if line.strip() and line[0] != "#"), "")  # netlists and .conllu have comments
    starts = {".jsonl": "{", ".bench": ("INPUT(", "OUTPUT("), ".blif": (".model", ".inputs")}
    suffix = next((suffix for suffix, start in starts.items() if first.startswith(start)), ".txt")
    suffix = ".conllu" if first.count("\t") == 9 else suffix
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / f"input{suffix}"
        copy.write_bytes(data)
        try:
            yield str(copy)
        except (Mistake, cavs.io.FormatError) as error:
            raise Mistake(str(error).replace(str(copy), "standard input")) from error


COMMANDS = {name: functools.partial(_train, command=name) for name in EPILOGS}
COMMANDS |= {"predict": _predict, "evaluate": _evaluate, "inspect": _inspect}
