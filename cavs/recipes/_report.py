"""The output of a run: a progress bar, a line per epoch, tables, pictures, and the commands that the user may write next."""

import contextlib
import errno
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import cavs
from cavs.recipes._data import PARTS
from cavs.recipes._options import Mistake

# Fields of graphs that no ready program reads, what they are, and how a program of the user reads them.
UNREAD = (
    ("edge_attr", "edges: the files have numbers of edges", "v.gather_all(fn, edges=True), and cavs.run(..., edges=...)"),
    ("x", "x: the files have features of vertices", "v.pull(), and cavs.run(F, params, sched, x)"),
)
# The files of a run beside those of its `Keeper`.
LOG, TEST, CURVE = "log.jsonl", "test.json", "curve.png"
SAY_EVERY = 30.0  # seconds after which a log without a progress bar gets a line within an epoch


class _Output(Console):
    """A console that raises an error if its reader has ended; rich ends the program without a word."""

    def on_broken_pipe(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python fails again when it ends
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE), "standard output")


class Messages:
    """The messages of a `Run`. `command`: how the user starts cavs, such as `uv run cavs`."""

    def __init__(self, command: str, run: Any, keeper: Any):
        self.console, self.command = _Output(quiet=jax.process_index() > 0), command
        self.run, self.keeper = run, keeper
        self._told = False  # whether `tuned` has printed its line

    def print(self, text: str) -> None:
        """Prints a line, which a narrow terminal wraps."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def _place(self) -> str:
        loader = self.run.loader
        return f"epoch {loader.epoch + 1}, step {loader.batch} of {len(loader)}"

    def _resume(self) -> str:
        return f"train --resume {shlex.quote(str(self.keeper.folder))}"

    @contextlib.contextmanager
    def bar(self) -> Iterator[Callable[[], None]]:
        """A progress bar, or a line now and then if the output is no terminal. Yields what to call after each dispatch."""
        console, loader, keeper, said = self.console, self.run.loader, self.keeper, time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("", total=self.run.total)

            def advance() -> None:
                nonlocal said
                loss = keeper.sums.get("loss", 0.0) / max(keeper.sums.get("count", 0.0), 1)
                compiling = self.run.step.compiling
                text = f"{self._place()}  loss {loss:.3f}"
                text += f", compiling ({compiling[0]} of {compiling[1]})" if compiling else ""
                progress.update(task, completed=loader.epoch * len(loader) + loader.batch, description=text)
                if not console.is_terminal and time.monotonic() - said > SAY_EVERY:
                    self.print(f"{text}  {keeper.seconds:.1f} s")
                    said = time.monotonic()

            yield advance

    def introduce(self) -> None:
        """Describes the data, the model, and a resumed run."""
        run, recipe, keeper = self.run, self.run.recipe, self.keeper
        options, facts = recipe.options, recipe.facts
        source = ", ".join(options.train) or "the reviews shipped with cavs"
        sizes = [f"{len(jax.tree.leaves(part)[0]):,} {PARTS[name]}" for name, part in run.data.parts.items()]
        known = [f"{len(facts[name]):,} {name}" for name in ("words", "labels") if name in facts]
        self.print(f"[bold]{escape(source)}[/]: {recipe.noun}s: {', '.join(sizes)}; {', '.join(known)}")
        size = sum(math.prod(x.shape) for x in jax.tree.leaves(run.like))
        program = f"{facts.get('program', recipe.name)}, hidden {options.hidden}"
        self.print(f"{program}, {size:,} parameters; {options.optimizer}, batch {options.batch}")
        if run.data.vectors is not None:
            found, total = int(run.data.vectors.found.sum()), len(run.data.vectors.found)
            self.print(f"{found} of {total} words ({100 * found / total:.1f} %) have a vector in {escape(options.embeddings)}")
        if run.memory is not None:
            parts, samples, needed = run.memory
            self.print(f"memory of a training step: {parts} parts of {samples}, {needed / 2**20:.1f} MiB compiled")
        if run.loader.seen:
            self.print(f"resuming {escape(str(keeper.folder))} at {self._place()}")
        for field, what, advice in UNREAD:
            if getattr(run.data.parts["train"], field, None) is not None:
                self.print(f"{what}, which no --program reads. To use them, write a vertex function with {advice}")
        for note in (*run.data.notes, *keeper.notes):
            self.print(escape(note))
        if keeper.done:
            limits = f"--epochs {options.epochs}, --max-steps {options.max_steps}, --patience {options.patience}"
            self.print(f"nothing is left to train within {limits}. Increase --epochs or --max-steps to keep training.")

    def evaluated(self, best: bool) -> None:
        """Prints the line of an epoch, or of an evaluation within it."""
        record = self.keeper.history[-1]
        epoch = record["epoch"]
        parts = [f"epoch {epoch:3d}" if isinstance(epoch, int) else f"epoch {epoch:.2f}", f"{record['seconds']:6.1f} s"]
        for label, sums in (("train", record["train"]), ("held-out", record["held_out"])):
            scores = self.run.recipe.scores(sums).items()
            parts.append(" ".join([label, *(f"{name} {cavs.data.shown(x)}" for name, x in scores if x is not None)]))
        self.print("  ".join(parts) + ("  *" if best else ""))

    def tuned(self) -> None:
        """Prints a line about the launches that the first step has tuned, if any, once."""
        if self.run.step.tuned and not self._told:
            self.print(f"kernels tuned for this GPU, once: {'; '.join(map(str, self.run.step.tuned))}")
            self._told = True

    def stopped(self) -> None:
        """Says how to continue after Ctrl-C."""
        self.print(f"stopped at {self._place()}. Everything is saved. To resume, with the same result as without the stop:")
        self.print(escape(f"  {self.command} {self._resume()}"))

    def failure(self, error: BaseException) -> BaseException:
        """The error to raise for one of the system: what failed, and how to continue. Others are returned as they are."""
        options = self.run.recipe.options
        if isinstance(error, OSError):
            text = f"{error.filename or 'a file'} cannot be written or read ({error.strerror or error})."
        elif out_of_memory(error):
            text = (
                f"out of memory. Lower --batch (now {options.batch}) or --hidden (now {options.hidden}), or write --memory 0.8."
            )
        elif jax.process_count() > 1:
            text = f"another process of this run ended ({str(error):.200})."
        else:
            return error
        saved = (self.keeper.folder / "last.npz").exists()
        advice = f"The last save is intact. Resume with: {self.command} {self._resume()}" if saved else "Nothing was saved."
        return Mistake(f"{text} Training stopped. {advice}", 1)

    def finish(self, seconds: float) -> None:
        """Tests the best epoch, draws the curve, and prints the results and the next commands."""
        run, recipe, keeper = self.run, self.run.recipe, self.keeper
        best = keeper.best
        results = {"train": best["train"], "dev": best["held_out"]}
        if "test" in run.data.parts:
            results["test"] = run.evaluate(keeper.restore_best(run.like), "test")
        if jax.process_index():  # the first process writes
            return
        if "test" in results:
            content = {"epoch": best["epoch"], "test": results["test"]}
            cavs.data.write_text(json.dumps(content, indent=1), keeper.folder / TEST)
        cavs.data.draw_history(keeper.history, keeper.folder / CURVE, recipe.scores)
        self.console.print(_results(recipe, run.data.parts, results))
        folder = shlex.quote(str(keeper.folder))
        epoch_seconds = [record["seconds"] for record in keeper.history if float(record["epoch"]).is_integer()]
        speed = f"fastest epoch {min(epoch_seconds):.2f} s of {len(run.loader)} steps; " if epoch_seconds else ""
        self.print(f"{seconds:.0f} s in total; {speed}programs compiled for training: {run.step.compilations}")
        self.print(escape(f"checkpoint (epoch {round(best['epoch'], 2)}) and training curve: {folder}, {folder}/{CURVE}"))
        options, last = recipe.options, keeper.history[-1]
        more = f"--epochs {2 * math.ceil(max(options.epochs, last['epoch']))}"
        if options.max_steps and last["step"] >= options.max_steps:
            more = f"--max-steps {2 * last['step']}"
        elif last["epoch"] < options.epochs:
            more = f"--patience {2 * options.patience}"
        for words, purpose in (
            (f"predict {folder} FILE", recipe.shows),
            (f"evaluate {folder} FILE", "score it on another file"),
            (f"{self._resume()} {more}", "train longer"),
        ):
            self.print(f"  {escape(self.command)} {escape(words):44}  [dim]{purpose}[/]")


def _results(recipe: Any, parts: Mapping[str, Any], results: Mapping[str, dict[str, float]]) -> Table:
    table = Table(title="the best epoch", title_justify="left", title_style="bold")
    rows = {
        name: {**recipe.baseline(parts["train"], parts[name]), "labels": int(sums["count"]), **recipe.scores(sums)}
        for name, sums in results.items()
    }
    columns = [*dict.fromkeys(column for row in rows.values() for column in row)]
    for column in ("", *columns):
        table.add_column(column, justify="right" if column else "left")
    for name, row in rows.items():
        table.add_row(PARTS[name], *(cavs.data.shown(row.get(column)) for column in columns))
    return table


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that the memory of the host or the device is exhausted."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error)
