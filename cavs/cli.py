"""The command line: `cavs train`, `tune`, `predict`, `evaluate` and `inspect`. Nothing here imports JAX at the top."""

import argparse
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

HELPS = {
    "train": "train a model on graphs, a tagger, a language model, a translator, ...",
    "tune": "time layouts of the kernels that cavs train runs on this GPU, and keep the fastest",
    "predict": "label, score or translate new samples with a checkpoint",
    "evaluate": "score a checkpoint on a file of labelled samples",
    "inspect": "show the contents of a file of graphs and the schedule of a batch",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: the command line without the program's name; `None` reads `sys.argv`.

    Returns:
        The exit code: 0; 1 if a file cannot be read or written, or the memory is exhausted; 2 for invalid arguments or files;
        130 after Ctrl-C, and 143 after SIGTERM, if training has begun.
    """
    words = sys.argv[1:] if arguments is None else [*arguments]
    with exit_on_interrupt() if arguments is None else contextlib.nullcontext():
        if not words or words[0] not in HELPS:
            return _help(words)
        from cavs.recipes._command import run

        return run(words[0], words[1:], None, program())


def _help(words: list[str]) -> int:
    """Prints the help or the version, or ends the program with code 2 if there is no such command."""
    import cavs
    from cavs._graphs.counted import suggestion

    text = "\n".join(f"  {name:10}{summary}" for name, summary in HELPS.items())
    parser = argparse.ArgumentParser(
        prog="cavs",
        description="Dynamic neural nets in JAX: trees, sequences, DAGs. Start with: cavs train",
        epilog=f"commands:\n{text}\n\nFor the options of a command write: cavs COMMAND --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="cavs COMMAND ...",
    )
    parser.add_argument("--version", action="version", version=f"cavs {cavs.__version__}")
    unknown = parser.parse_known_args(words)[1]
    if unknown:
        hint = suggestion(unknown[0], HELPS)
        parser.error(f"got {unknown[0]!r}; expected one of {', '.join(HELPS)}. {hint}".rstrip())
    parser.print_help()
    return 0


def program() -> str:
    """The words with which the user started this program, for commands that messages suggest: `cavs`, `uv run cavs`, ..."""
    name = Path(sys.argv[0])
    if name.name in ("__main__.py", "cli.py"):
        python = Path(sys.executable)
        return f"{python.name if shutil.which(python.name) == str(python) else python} -m cavs"
    if name.name != "cavs":
        return "cavs"  # called from another program
    if "UV_RUN_RECURSION_DEPTH" in os.environ or "UV" in os.environ:
        return "uv run cavs"
    return "cavs" if shutil.which("cavs") else str(name)


@contextlib.contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """A context in which Ctrl-C ends the program at once with code 130, also while modules are imported or code is compiled.

    A `KeyboardInterrupt` raised there may be swallowed by a callback or leave a library half imported. The training loop has
    its own handler, which saves first.
    """
    before = signal.signal(signal.SIGINT, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _exit(signum: int, frame: FrameType | None) -> None:
    with contextlib.suppress(Exception):  # the signal may have come in the middle of a `print`
        sys.stdout.flush()
    os.write(2, b"\ncavs: interrupted\n")
    os._exit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
