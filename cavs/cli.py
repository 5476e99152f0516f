"""The command line: `cavs train`, `cavs predict`, `cavs inspect`."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

_FORMATS = """files of graphs, by the end of the name, each also with .gz:
  .txt .ptb .trees .mrg  trees in brackets, one label a vertex: (3 (2 not) (1 (1 bad) (2 .)))
  .conllu                dependency trees; the label of a word is its part of speech
  .jsonl                 any graphs: {"children": [[], [], [0, 1]], "inputs": ["a", "b", null], "labels": [0, 1, 1]}
  .bench .blif           netlists; gates by kind, label 1 at outputs
  .npz                   what cavs.io.save_npz wrote
"""

_TAGGED = """files of tagged sentences (--task tag), known by name or content, each also with .gz:
  .conllu                the tag is UPOS; another: --column xpos
  a word a line          columns, blank lines between sentences; the tag is the last column, or --column N
  word|TAG word|TAG      a sentence a line
"""

_PAIRS = """files of sentence pairs (--task nmt), each also with .gz:
  source TAB target      or `source ||| target`; a pair a line, words split at white space
"""

_TRAIN = f"""examples:
  cavs train                                          a Tree-LSTM on the reviews that come with cavs; under a minute
  cavs train train.txt --dev dev.txt --test test.txt  your own trees
  cavs train parses.conllu --program child-sum --loss all
  cavs train --task dag circuits.bench --loss all     any directed acyclic graphs: netlists, edges in .jsonl
  cavs train train.txt --embeddings glove.6B.300d.txt.gz --dropout 0.5
  cavs train --task tag train.conllu --dev dev.conllu parts of speech, by a BiLSTM that spells rare words
  cavs train --task tag ner.txt --dev ner.dev.txt     entities (O, B-PER, I-PER, ...), scored by F1 as conlleval does
  cavs train --task lm sentences.txt --hidden 256     an LSTM language model over text, one sentence a line
  cavs train --task nmt pairs.tsv --dev dev.tsv       an encoder-decoder with attention; cavs predict then translates
  cavs train --resume runs/reviews                    go on, bit for bit as if never stopped
  cavs train --resume runs/reviews --epochs 40        train longer

Ctrl-C (or SIGTERM) ends the step in hand, saves, and says how to go on.

{_FORMATS}
{_TAGGED}
{_PAIRS}
A vertex reads a row of a table of vectors: its word; where the file has no inputs, its kind. Only the rows that a batch
reads are updated; for adam this is the "lazy" Adam, whose moments of a word stand still while the word is not read.

Compiled code is kept in ~/.cache/cavs for the next start (another place: JAX_COMPILATION_CACHE_DIR; none:
JAX_ENABLE_COMPILATION_CACHE=false). On a GPU the same bits every time need XLA_FLAGS=--xla_gpu_deterministic_ops=true.
"""

_PREDICT = f"""examples:
  cavs predict runs/reviews new.txt
  cavs predict runs/reviews new.txt --out labels.tsv
  cavs predict runs/sentences new.txt                 a language model: scores each sentence
  cavs predict runs/ner new.txt                       a tagger: word|TAG word|TAG, a sentence a line
  cavs predict runs/pairs new.txt                     a translator: translates each line

Tab-separated, a line a graph: number from 0, label, its probability, words. With --vertices a line a vertex: graph, vertex,
label, probability, word. For a language model: number, log-probability, perplexity of a word, sentence. For a tagger:
number, sentence; it reads plain text too, a sentence a line. For a translator: number, translation. Words that training
did not have are read as unknown, or letter by letter. The folder is all that is needed: it holds parameters (.npz) and JSON.

{_FORMATS}"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code: 0, 1 where a file cannot be read or written, 2 for a mistake in the arguments
    or files, 130 after Ctrl-C."""
    parser = _parser()
    given = vars(parser.parse_args(arguments))
    command = given.pop("command")
    from cavs._readers import FormatError
    from cavs._train import TrainError

    try:
        return {"train": _train, "predict": _predict, "inspect": _inspect}[command](given)
    except (TrainError, FormatError) as error:
        print(f"cavs {command}: {error}", file=sys.stderr)
        return error.code if isinstance(error, TrainError) else 2
    except FileNotFoundError as error:
        print(f"cavs {command}: there is no file {error.filename}.", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `cavs predict ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        which = "a file" if error.filename is None else error.filename
        print(f"cavs {command}: {which} cannot be read or written ({error.strerror or error}).", file=sys.stderr)
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

    try:
        inspect(given["file"], given.get("batch", 64), given.get("out"))
    except ValueError as error:
        raise TrainError(str(error)) from error
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cavs",
        description="Dynamic neural nets in JAX: trees, sequences, DAGs. Start with: cavs train",
        epilog="cavs COMMAND --help says more.",
    )
    parser.add_argument("--version", action="version", version=f"cavs {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_train(commands)
    _add_predict(commands)
    _add_inspect(commands)
    return parser


def _command(commands: Any, name: str, short: str, epilog: str) -> argparse.ArgumentParser:
    # SUPPRESS: what was not given is absent, so that defaults (which differ by task) stand in one place, Config.
    return commands.add_parser(
        name,
        help=short,
        description=short[0].upper() + short[1:] + ".",
        epilog=epilog,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_train(commands: Any) -> None:
    parser = _command(
        commands,
        "train",
        "train a model on graphs, a tagger, a language model, or a translator",
        _TRAIN,
    )
    data = parser.add_argument_group("data")
    data.add_argument("train", nargs="?", metavar="FILE", help="what to train on (without: reviews that come with cavs)")
    data.add_argument("--dev", metavar="FILE", help="what chooses the best epoch (without: a seeded tenth of FILE)")
    data.add_argument("--test", metavar="FILE", help="what the best epoch is tested on at the end")
    data.add_argument(
        "--task",
        metavar="NAME",
        help="classify, also called sentiment or dag: label graphs or their vertices (default); tag: label words; lm: predict "
        "next words; nmt: translate",
    )
    data.add_argument("--column", metavar="NAME", help="tag: which column is the label (default: upos; else the last)")
    data.add_argument(
        "--embeddings", metavar="FILE", help="text file of word vectors, as GloVe's; words it lacks start at random"
    )
    data.add_argument(
        "--min-count", type=int, metavar="N", help="rarer words are <unk>, or spelled (default 1; lm, nmt 2; tag 5)"
    )
    data.add_argument("--vocab-size", type=int, metavar="N", help="keep the N most frequent words (default 0: all)")

    model = parser.add_argument_group("model")
    model.add_argument(
        "--program",
        metavar="NAME",
        help="binary-tree-lstm, nary-tree-lstm, child-sum-tree-lstm, tree-fc, rvnn; for DAGs dagnn; for chains lstm, gru, "
        "elman-rnn; a beginning is enough (default: by the graphs); tag: char-bilstm (default), bilstm",
    )
    model.add_argument("--hidden", type=int, metavar="N", help="hidden units (default 100; lm 200; nmt 256)")
    model.add_argument("--layers", type=int, metavar="N", help="layers, for lstm, char-bilstm and bilstm (default 1)")
    model.add_argument(
        "--embedding-size", type=int, metavar="N", help="size of a word's vector (default: as --hidden; tag 128)"
    )
    model.add_argument("--char-size", type=int, metavar="N", help="tag: size of a character's vector (default 32)")
    model.add_argument("--dropout", type=float, metavar="P", help="at inputs and before the classifier (default 0.2; tag 0.3)")

    training = parser.add_argument_group("training")
    training.add_argument(
        "--loss", choices=("root", "all"), help="at each root, or at every labelled vertex (default: all, if any)"
    )
    training.add_argument(
        "--score", choices=("root", "all"), help="accuracy that picks the best epoch (default: by the graphs)"
    )
    training.add_argument("--batch", type=int, metavar="N", help="graphs, sentences or pairs a step (default 20; nmt, tag 32)")
    training.add_argument("--epochs", type=int, metavar="N", help="passes over the data (default 20; lm, nmt 10; tag 12)")
    training.add_argument("--optimizer", choices=("adam", "adagrad", "sgd"), help="default adagrad; lm, nmt, tag adam")
    training.add_argument("--lr", type=float, metavar="X", help="learning rate (default 0.05; lm, tag 0.002; nmt 0.001)")
    training.add_argument(
        "--embedding-lr", type=float, metavar="X", help="learning rate of word vectors (default: as --lr; 0 keeps them)"
    )
    training.add_argument(
        "--weight-decay",
        type=float,
        metavar="X",
        help="L2 of weight matrices, added to the gradient (default 1e-5; lm, nmt, tag 0)",
    )
    training.add_argument("--clip", type=float, metavar="X", help="largest norm of the gradient; 0: any (default 5)")
    training.add_argument(
        "--patience", type=int, metavar="N", help="stop after N epochs without a better score; 0: never (default)"
    )
    training.add_argument("--seed", type=int, metavar="N", help="decides initial values, batches, dropout (default 0)")

    run = parser.add_argument_group("run")
    run.add_argument("--out", metavar="DIR", help="folder of the checkpoint and the curve (default: a new one under runs/)")
    run.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="DIR",
        help="go on with a run (without DIR: the latest under runs/); of the settings only --epochs and --patience may change",
    )


def _add_predict(commands: Any) -> None:
    parser = _command(commands, "predict", "label new graphs with a checkpoint", _PREDICT)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="the folder that cavs train wrote")
    parser.add_argument("file", metavar="FILE", help="graphs to label (their own labels are not read)")
    parser.add_argument("--out", metavar="FILE", help="write here, not to the terminal")
    parser.add_argument("--vertices", action="store_true", help="label every vertex, not only the roots")


def _add_inspect(commands: Any) -> None:
    parser = _command(commands, "inspect", "show what a file of graphs holds and how a batch of it is scheduled", _FORMATS)
    parser.add_argument("file", metavar="FILE", help="graphs")
    parser.add_argument("--batch", type=int, metavar="N", help="graphs a batch (default 64)")
    parser.add_argument("--out", metavar="FILE", help="write a picture of the schedule here (.png, .pdf, .svg)")


def _version() -> str:
    from cavs import __version__

    return __version__


if __name__ == "__main__":
    sys.exit(main())
