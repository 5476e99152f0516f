"""The command line: `cavs train`, `cavs predict`, `cavs inspect`."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    _Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
    _Group: TypeAlias = argparse._ArgumentGroup

_FORMATS = """files of graphs, by the end of the name, optionally followed by .gz:
  .txt .ptb .trees .mrg  bracketed trees with a label at each vertex: (3 (2 not) (1 (1 bad) (2 .)))
  .conllu                dependency trees; the label of a word is its part of speech
  .jsonl                 any graphs: {"children": [[], [], [0, 1]], "inputs": ["a", "b", null], "labels": [0, 1, 1]}
  .bench .blif           netlists; gates by kind, label 1 at outputs
  .npz                   files written by cavs.io.save_npz
"""

_TAGGED = """files of tagged sentences (--task tag), recognised by name or content, optionally followed by .gz:
  .conllu                the tag is UPOS; for another column write --column xpos
  one word per line      columns, blank lines between sentences; the tag is the last column, or --column N
  word|TAG word|TAG      one sentence per line
"""

_PAIRS = """files of sentence pairs (--task nmt), optionally followed by .gz:
  source TAB target      or `source ||| target`; one pair per line, words separated by white space
"""

_TRAIN = f"""examples:
  cavs train                                          a Tree-LSTM on the reviews shipped with cavs; under a minute
  cavs train train.txt --dev dev.txt --test test.txt  your own trees
  cavs train parses.conllu --program child-sum --loss all
  cavs train --task dag circuits.bench --loss all     any directed acyclic graphs: netlists, edges in .jsonl
  cavs train train.txt --embeddings glove.6B.300d.txt.gz --dropout 0.5
  cavs train --task tag train.conllu --dev dev.conllu parts of speech, with a BiLSTM that spells rare words
  cavs train --task tag ner.txt --dev ner.dev.txt     entities (O, B-PER, I-PER, ...), scored by F1 as conlleval does
  cavs train --task lm sentences.txt --hidden 256     an LSTM language model over text, one sentence per line
  cavs train --task nmt pairs.tsv --dev dev.tsv       an encoder-decoder with attention; cavs predict then translates
  cavs train --resume runs/reviews                    resume a stopped run; the result is bitwise the same
  cavs train --resume runs/reviews --epochs 40        train longer

Ctrl-C (or SIGTERM) stops after the current step, saves, and prints the command that resumes.

{_FORMATS}
{_TAGGED}
{_PAIRS}
A vertex reads a row of a table of vectors: that of its word or, if the file has no inputs, of its kind. A step updates only
the rows that its batch reads. With adam this is "lazy" Adam: the moments of a word do not decay while the word is not read.

Compiled code is cached in ~/.cache/cavs. JAX_COMPILATION_CACHE_DIR selects another folder, and
JAX_ENABLE_COMPILATION_CACHE=false disables the cache. Bitwise reproducible results on a GPU need
XLA_FLAGS=--xla_gpu_deterministic_ops=true.
"""

_PREDICT = f"""examples:
  cavs predict runs/reviews new.txt
  cavs predict runs/reviews new.txt --out labels.tsv
  cavs predict runs/sentences new.txt                 a language model: scores each sentence
  cavs predict runs/ner new.txt                       a tagger: word|TAG word|TAG, one sentence per line
  cavs predict runs/pairs new.txt                     a translator: translates each line

The output is tab-separated, one line per graph: its number (from 0), label, probability of the label, and words. With
--vertices, one line per vertex: graph, vertex, label, probability, word. For a language model: number, log-probability,
perplexity per word, sentence. For a tagger: number, sentence; it also reads plain text, one sentence per line. For a
translator: number, translation. Words that do not occur in the training data are read as unknown, or spelled letter by letter.
The folder of the run is sufficient: it contains the parameters (.npz) and JSON.

{_FORMATS}"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: the command line without the program's name; `None` reads `sys.argv`.

    Returns:
        The exit code: 0; 1 if a file cannot be read or written; 2 for invalid arguments or files; 130 after Ctrl-C.
    """
    given = vars(_parser().parse_args(arguments))
    command = given.pop("command")
    from cavs._readers import FormatError
    from cavs._train import TrainError

    try:
        return {"train": _train, "predict": _predict, "inspect": _inspect}[command](given)
    except (TrainError, FormatError) as error:
        print(f"cavs {command}: {error}", file=sys.stderr)
        return error.code if isinstance(error, TrainError) else 2
    except FileNotFoundError as error:
        print(f"cavs {command}: {error.filename} does not exist.", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `cavs predict ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        name = "a file" if error.filename is None else error.filename
        print(f"cavs {command}: {name} cannot be read or written ({error.strerror or error}).", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"cavs {command}: interrupted", file=sys.stderr)
        return 130


def _train(given: dict[str, Any]) -> int:
    from cavs._feed.host_memory import keep_host_memory
    from cavs._train import keep_compiled, train

    keep_host_memory()
    keep_compiled()
    out, resume = given.pop("out", None), given.pop("resume", None)
    return train(given, out, resume)


def _predict(given: dict[str, Any]) -> int:
    from cavs._train import keep_compiled, predict

    keep_compiled()
    predict(given["checkpoint"], given["file"], given.get("out"), given.get("vertices", False))
    return 0


def _inspect(given: dict[str, Any]) -> int:
    from cavs._debug.inspect import inspect
    from cavs._train import TrainError
    from cavs._train.config import check_file

    check_file("file", given["file"])
    try:
        inspect(given["file"], given.get("batch", 64), given.get("out"))
    except ValueError as error:
        raise TrainError(str(error)) from error
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cavs",
        description="Dynamic neural nets in JAX: trees, sequences, DAGs. Start with: cavs train",
        epilog="For the options of a command write: cavs COMMAND --help",
    )
    parser.add_argument("--version", action="version", version=f"cavs {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_train(commands)
    _add_predict(commands)
    _add_inspect(commands)
    return parser


def _command(commands: "_Commands", name: str, short: str, epilog: str) -> argparse.ArgumentParser:
    # SUPPRESS omits the options that were not given: their defaults depend on the task and are defined in `Config`.
    return commands.add_parser(
        name,
        help=short,
        description=short[0].upper() + short[1:] + ".",
        epilog=epilog,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_train(commands: "_Commands") -> None:
    parser = _command(
        commands,
        "train",
        "train a model on graphs, a tagger, a language model, or a translator",
        _TRAIN,
    )
    _add_data(parser.add_argument_group("data"))
    _add_model(parser.add_argument_group("model"))
    _add_training(parser.add_argument_group("training"))
    _add_run(parser.add_argument_group("run"))


def _add_data(group: "_Group") -> None:
    group.add_argument("train", nargs="?", metavar="FILE", help="the training data (default: the reviews shipped with cavs)")
    group.add_argument(
        "--dev", metavar="FILE", help="held-out data that choose the best epoch (default: a tenth of FILE, drawn with the seed)"
    )
    group.add_argument("--test", metavar="FILE", help="data on which the best epoch is tested at the end")
    group.add_argument(
        "--task",
        metavar="NAME",
        help="classify, also called sentiment or dag: label graphs or their vertices (default); tag: label words; lm: predict "
        "the next word; nmt: translate",
    )
    group.add_argument("--column", metavar="NAME", help="tag: the column of the label (default: upos; else the last)")
    group.add_argument(
        "--embeddings",
        metavar="FILE",
        help="text file of word vectors in GloVe's format; words that it lacks are initialised at random",
    )
    group.add_argument(
        "--min-count", type=int, metavar="N", help="rarer words become <unk>, or are spelled (default 1; lm, nmt 2; tag 5)"
    )
    group.add_argument("--vocab-size", type=int, metavar="N", help="keep the N most frequent words (default 0: all)")


def _add_model(group: "_Group") -> None:
    group.add_argument(
        "--program",
        metavar="NAME",
        help="binary-tree-lstm, nary-tree-lstm, child-sum-tree-lstm, tree-fc, rvnn; for DAGs dagnn; for chains lstm, gru, "
        "elman-rnn; may be abbreviated (default: depends on the graphs); tag: char-bilstm (default), bilstm",
    )
    group.add_argument("--hidden", type=int, metavar="N", help="hidden units (default 100; lm 200; nmt 256)")
    group.add_argument("--layers", type=int, metavar="N", help="layers, for lstm, char-bilstm and bilstm (default 1)")
    group.add_argument(
        "--embedding-size", type=int, metavar="N", help="size of a word's vector (default: the value of --hidden; tag 128)"
    )
    group.add_argument("--char-size", type=int, metavar="N", help="tag: size of a character's vector (default 32)")
    group.add_argument(
        "--dropout", type=float, metavar="P", help="dropout of inputs and before the classifier (default 0.2; tag 0.3)"
    )


def _add_training(group: "_Group") -> None:
    group.add_argument(
        "--loss",
        choices=("root", "all"),
        help="compute the loss at each root, or at every labelled vertex (default: all, if any other vertex has a label)",
    )
    group.add_argument(
        "--score",
        choices=("root", "all"),
        help="where the accuracy that chooses the best epoch is computed (default: depends on the graphs)",
    )
    group.add_argument("--batch", type=int, metavar="N", help="graphs, sentences or pairs per step (default 20; nmt, tag 32)")
    group.add_argument("--epochs", type=int, metavar="N", help="passes over the data (default 20; lm, nmt 10; tag 12)")
    group.add_argument("--optimizer", choices=("adam", "adagrad", "sgd"), help="default adagrad; lm, nmt, tag adam")
    group.add_argument("--lr", type=float, metavar="X", help="learning rate (default 0.05; lm, tag 0.002; nmt 0.001)")
    group.add_argument(
        "--embedding-lr",
        type=float,
        metavar="X",
        help="learning rate of word vectors (default: the value of --lr; 0 freezes them)",
    )
    group.add_argument(
        "--weight-decay",
        type=float,
        metavar="X",
        help="L2 penalty of weight matrices, added to the gradient (default 1e-5; lm, nmt, tag 0)",
    )
    group.add_argument("--clip", type=float, metavar="X", help="largest norm of the gradient; 0 disables clipping (default 5)")
    group.add_argument(
        "--patience",
        type=int,
        metavar="N",
        help="stop after N epochs without a better score; 0 never stops early (default 0)",
    )
    group.add_argument("--seed", type=int, metavar="N", help="seed of initial values, batches and dropout (default 0)")


def _add_run(group: "_Group") -> None:
    group.add_argument(
        "--out", metavar="DIR", help="folder of the checkpoint and the training curve (default: a new one under runs/)"
    )
    group.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="DIR",
        help="resume a run (without DIR: the latest under runs/); only --epochs and --patience may be changed",
    )


def _add_predict(commands: "_Commands") -> None:
    parser = _command(commands, "predict", "label new graphs with a checkpoint", _PREDICT)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="the folder that cavs train wrote")
    parser.add_argument("file", metavar="FILE", help="graphs to label; labels in the file are ignored")
    parser.add_argument("--out", metavar="FILE", help="write to this file instead of the terminal")
    parser.add_argument("--vertices", action="store_true", help="label every vertex, not only the roots")


def _add_inspect(commands: "_Commands") -> None:
    parser = _command(commands, "inspect", "show the contents of a file of graphs and the schedule of a batch", _FORMATS)
    parser.add_argument("file", metavar="FILE", help="graphs")
    parser.add_argument("--batch", type=int, metavar="N", help="graphs per batch (default 64)")
    parser.add_argument("--out", metavar="FILE", help="write a picture of the schedule to this file (.png, .pdf, .svg)")


def _version() -> str:
    from cavs import __version__

    return __version__


if __name__ == "__main__":
    sys.exit(main())
