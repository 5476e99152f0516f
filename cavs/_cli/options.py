"""The options of all commands."""

import argparse
from typing import TYPE_CHECKING, TypeAlias

import cavs
from cavs._cli import texts
from cavs._cli.parser import Parser

if TYPE_CHECKING:
    Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
    Group: TypeAlias = argparse._ArgumentGroup


def build_parser() -> Parser:
    parser = Parser(
        prog="cavs",
        description="Dynamic neural nets in JAX: trees, sequences, DAGs. Start with: cavs train",
        epilog="For the options of a command write: cavs COMMAND --help",
    )
    parser.add_argument("--version", action="version", version=f"cavs {cavs.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    _add_train(commands)
    _add_predict(commands)
    _add_evaluate(commands)
    _add_inspect(commands)
    _add_completion(commands)
    return parser


def _command(commands: "Commands", name: str, short: str, epilog: str) -> Parser:
    # SUPPRESS omits the options that were not given: their defaults depend on the task and are defined in `Config`.
    return commands.add_parser(
        name,
        help=short,
        description=short[0].upper() + short[1:] + ".",
        epilog=epilog,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_train(commands: "Commands") -> None:
    parser = _command(
        commands,
        "train",
        "train a model on graphs, a tagger, a language model, or a translator",
        texts.TRAIN,
    )
    _add_data(parser.add_argument_group("data"))
    _add_model(parser.add_argument_group("model"))
    _add_training(parser.add_argument_group("training"))
    _add_run(parser.add_argument_group("run"))


def _add_data(group: "Group") -> None:
    group.add_argument("train", nargs="*", metavar="FILE", help="the training data (default: the reviews shipped with cavs)")
    group.add_argument(
        "--dev", metavar="FILE", help="held-out data that choose the best epoch (default: a tenth of FILE, drawn with the seed)"
    )
    group.add_argument("--test", metavar="FILE", help="data on which the best epoch is tested at the end")
    group.add_argument(
        "--task",
        metavar="NAME",
        help="classify, also called sentiment or dag: label graphs or their vertices (default); tag, also called pos or ner: "
        "label words; lm: predict the next word; nmt: translate; regress: predict numbers",
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


def _add_model(group: "Group") -> None:
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


def _add_training(group: "Group") -> None:
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
    group.add_argument(
        "--memory",
        metavar="BUDGET",
        help="most memory of a training step: 2GiB, bytes, a fraction of the device such as 0.5, or min; batches are then "
        "computed in parts and less is kept, with the same results up to rounding (default none)",
    )
    group.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="devices that share each batch, such as GPUs, with the same results up to rounding; 0: all (default 1)",
    )
    group.add_argument("--epochs", type=int, metavar="N", help="passes over the data (default 20; lm, nmt 10; tag 12)")
    group.add_argument("--max-steps", type=int, metavar="N", help="stop after N steps in all (default 0: after --epochs)")
    group.add_argument(
        "--save-every",
        type=int,
        metavar="N",
        help="evaluate and save within epochs, after every N steps of an epoch (default 0: only save, every 5 minutes)",
    )
    group.add_argument("--optimizer", choices=("adam", "adamw", "adagrad", "sgd"), help="default adagrad; lm, nmt, tag adam")
    group.add_argument("--lr", type=float, metavar="X", help="learning rate (default 0.05; lm, tag 0.002; nmt 0.001)")
    group.add_argument(
        "--schedule",
        choices=("constant", "linear", "cosine"),
        help="how the learning rate falls to 0 until the last step (default constant)",
    )
    group.add_argument("--warmup", type=int, metavar="N", help="steps in which the learning rate rises from 0 (default 0)")
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
        help="decay of weight matrices, added to the gradient, or to the update with adamw (default 1e-5; lm, nmt, tag 0)",
    )
    group.add_argument("--clip", type=float, metavar="X", help="largest norm of the gradient; 0 disables clipping (default 5)")
    group.add_argument(
        "--patience",
        type=int,
        metavar="N",
        help="stop after N epochs without a better score; 0 never stops early (default 0)",
    )
    group.add_argument("--seed", type=int, metavar="N", help="seed of initial values, batches and dropout (default 0)")


def _add_run(group: "Group") -> None:
    group.add_argument("--config", metavar="FILE", help="read options from a TOML file; the command line overrides them")
    group.add_argument(
        "--out", metavar="DIR", help="folder of the checkpoint and the training curve (default: a new one under runs/)"
    )
    group.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="DIR",
        help="resume a run (without DIR: the latest under runs/); takes options that change neither data, model nor batches",
    )

    group.add_argument(
        "--log",
        choices=("none", "json", "tensorboard"),
        help="write loss, speed and where the time goes every 10 seconds, to log.jsonl in the run's folder; tensorboard: "
        "also event files (default none)",
    )
    group.add_argument(
        "--distributed",
        metavar="HOST:PORT,N,I",
        help="this is process I of N, each started with this command; HOST:PORT is the address of process 0; auto: ask the "
        "cluster. All devices of all processes share each batch, and process 0 writes",
    )


def _add_predict(commands: "Commands") -> None:
    parser = _command(commands, "predict", "label, score or translate new samples with a checkpoint", texts.PREDICT)
    _add_checkpoint(parser, "samples to predict; their labels are ignored; - reads standard input")
    parser.add_argument("--out", metavar="FILE", help="write to this file instead of the terminal")
    parser.add_argument("--vertices", action="store_true", help="a line for every vertex or word, not only for graphs")
    parser.add_argument("--probabilities", action="store_true", help="the probabilities of all labels")
    parser.add_argument("--json", action="store_true", help="write a JSON object per line")
    parser.add_argument("--no-header", action="store_true", help="do not write the line that names the columns")


def _add_evaluate(commands: "Commands") -> None:
    parser = _command(commands, "evaluate", "score a checkpoint on a file of labelled samples", texts.EVALUATE)
    _add_checkpoint(parser, "labelled samples; - reads standard input")
    parser.add_argument("--json", action="store_true", help="print one JSON object with all scores")
    parser.add_argument("--out", metavar="FILE", help="write a picture of the confusion matrix to this file (.png, .pdf, .svg)")


def _add_checkpoint(parser: Parser, file: str) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="the folder that cavs train wrote")
    parser.add_argument("file", metavar="FILE", help=file)


def _add_inspect(commands: "Commands") -> None:
    parser = _command(commands, "inspect", "show the contents of a file of graphs and the schedule of a batch", texts.INSPECT)
    parser.add_argument("file", metavar="FILE", help="graphs, tagged sentences, text, or sentence pairs")
    parser.add_argument(
        "--task", metavar="NAME", help="what the file is for, as in cavs train (default: as its content suggests)"
    )
    parser.add_argument("--batch", type=int, metavar="N", help="graphs per batch (default 64)")
    parser.add_argument("--out", metavar="FILE", help="write a picture of the schedule to this file (.png, .pdf, .svg)")


def _add_completion(commands: "Commands") -> None:
    parser = _command(commands, "completion", "print a script that completes options with the Tab key", texts.COMPLETION)
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")
