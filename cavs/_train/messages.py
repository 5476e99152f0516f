"""The messages of a training run: what is trained, how it ended, and the commands that the user may write next."""

import dataclasses
import os
import shlex
from pathlib import Path

import jax
from rich.console import Console
from rich.markup import escape

from cavs._graphs.counted import counted
from cavs._train import report
from cavs._train.config import Config
from cavs._train.data import Data
from cavs._train.loop import Progress, Trainer
from cavs._train.model import weight_shapes
from cavs._train.task import Sums


@dataclasses.dataclass(frozen=True)
class Messages:
    """Where messages are printed, and how the user starts cavs: `cavs`, `uv run cavs`, ..."""

    console: Console
    command: str

    def print(self, text: str) -> None:
        """Prints a line, which a narrow terminal wraps."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def introduce(self, config: Config, data: Data, progress: Progress, trainer: Trainer) -> None:
        """Describes the data, the model, and a resumed run."""
        size = sum(x.size for x in jax.tree.leaves(weight_shapes(trainer.model)))
        source = "the reviews shipped with cavs" if config.train is None else config.train
        self.print(f"[bold]{escape(source)}[/]: {report.describe(data, trainer.task)}")
        where = "each graph" if data.facts.get("at") == "graph" else "the roots" if config.loss == "root" else "every vertex"
        self.print(
            f"{config.program}, hidden {config.hidden}, word vectors of {config.embedding_size}, {size:,} parameters; "
            f"{config.optimizer}, batch {config.batch}, loss at {where}"
        )
        if data.vectors is not None:
            found, total = int(data.vectors.found.sum()), len(data.words)
            self.print(
                f"{found} of {counted(total, 'word')} ({100 * found / total:.1f} %) have a vector in "
                f"{escape(str(config.embeddings))}; the others are initialised at random"
            )
        if getattr(data.train, "edge_attr", None) is not None:
            self.print(
                "[yellow]edges: the files have numbers of edges, which no --program reads. To use them, write a vertex "
                "function with v.gather_all(fn, edges=True), and train it with cavs.run(..., edges=...)[/]"
            )
        if trainer.memory.table:
            self.print(trainer.memory.table)
        if progress.epoch or progress.step:
            self.print(f"resuming {trainer.folder} at epoch {progress.epoch + 1}, step {progress.step} of {trainer.steps}")
        for note in (*data.notes, *trainer.notes):
            self.print(escape(note))

    def how_to_resume(self, folder: Path) -> str:
        """How to continue after an error."""
        if (folder / "model.json").exists() and (folder / "last.json").exists():
            again = f"{self.command} train --resume {shlex.quote(str(folder))}"
            return f"The last save is intact. Fix the problem and resume with: {again}"
        return "Nothing was saved. Fix the problem and start with: the same command"

    def nothing_left(self, config: Config, trainer: Trainer) -> str:
        """That a resumed run has nothing left to train, and which option lets it go on."""
        limits = [f"--epochs {config.epochs} ({counted(config.epochs * trainer.steps, 'step')})"]
        limits += [f"--max-steps {config.max_steps}"] if config.max_steps else []
        limits += [f"--patience {config.patience}"] if config.patience else []
        return f"nothing is left to train within {', '.join(limits)}. To train longer, raise what ended the run."

    def stopped(self, progress: Progress, trainer: Trainer) -> None:
        """How to continue after Ctrl-C."""
        self.print(
            f"stopped in epoch {progress.epoch + 1} after step {progress.step} of {trainer.steps}. Everything is saved. To "
            "resume, with the same result as without the stop:\n"
            f"  {self.command} train --resume {shlex.quote(str(trainer.folder))}"
        )

    def finish(
        self,
        config: Config,
        data: Data,
        progress: Progress,
        trainer: Trainer,
        results: dict[str, Sums],
        seconds: float,
    ) -> None:
        """The results of a run, its speed, and the next commands."""
        self.console.print(trainer.task.results(data, results))
        step, evaluation = trainer.compilations
        speed = ""
        if progress.history:
            fastest = min(record["seconds"] for record in progress.history)
            per_second = f"{data.train.num_vertices / fastest:,.0f} vertices per second"
            speed = f"fastest epoch {fastest:.2f} s ({counted(trainer.steps, 'step')}, {per_second}); "
        self.print(f"{seconds:.0f} s in total; {speed}batch shapes compiled: {step} for training, {evaluation} for evaluation")
        best, where = progress.best(config), shlex.quote(str(trainer.folder))
        assert best is not None
        self.print(
            f"checkpoint (epoch {round(best['epoch'], 2)}) and training curve: {where}, {where}/curve.png\n\n[bold]next[/]"
        )
        lines = [(f"predict {where} FILE", trainer.task.predicts), (f"evaluate {where} FILE", "score it on another file")]
        if config.train:
            file = shlex.quote(os.path.relpath(config.train))
            task = "" if config.task == "classify" else f" --task {config.task}"
            lines += [(f"inspect {file}{task}", "show the contents of a file and its batches")]
        limit = "max-steps" if 0 < config.max_steps <= config.epochs * trainer.steps else "epochs"
        longer = 2 * (config.max_steps if limit == "max-steps" else config.epochs)
        lines += [(f"train --resume {where} --{limit} {longer}", "train longer")]
        if config.train is None:
            lines += [("train FILE", f"train on your own data: trees, DAGs ({self.command} train --help)")]
        width = max(len(words) for words, _ in lines)
        for words, what in lines:
            self.print(f"  {escape(self.command)} {escape(words.ljust(width))}  [dim]{what}[/]")
