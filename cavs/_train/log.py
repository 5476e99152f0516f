"""`cavs train --log`: a `cavs.data.Log` of the training loop, and the scores of each evaluation, in the folder of the run."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from cavs._feed.loader import Loader
from cavs._step.log import Log, Record, json_lines, tensorboard
from cavs._train.config import TrainError
from cavs._train.step import DeviceMetrics
from cavs._train.task import Sums

FILE = "log.jsonl"


class RunLog:
    """The log of a run.

    Args:
        kind: "json", or "tensorboard" for event files as well.
        folder: the folder of the run.
        loader: the loader of the training batches.

    Raises:
        TrainError: the package for event files is missing.
    """

    def __init__(self, kind: str, folder: Path, loader: Loader):
        self._writers, self._loader = [json_lines(folder / FILE)], loader
        if kind == "tensorboard":
            try:
                self._writers.append(tensorboard(folder))
            except ModuleNotFoundError as error:
                raise TrainError(f"--log: {error}") from error
        self._log: Log | None = None

    @contextlib.contextmanager
    def steps(self, done: int) -> Iterator[None]:
        """A context in which `add` reports training steps, after `done` steps."""
        with Log(self._loader, *self._writers, metrics=_loss, step=done) as self._log:
            yield

    def add(self, metrics: DeviceMetrics, steps: int) -> None:
        """Adds the metrics of one dispatch of this many steps."""
        assert self._log is not None
        self._log(metrics, steps)

    def evaluated(self, done: int, epoch: float, held_out: Sums, score: float) -> None:
        """Writes the scores of an evaluation after `done` steps."""
        for write in self._writers:
            write({"step": done, "epoch": epoch, "held_out_loss": _mean(held_out), "score": score})


def _loss(metrics: DeviceMetrics) -> Record:
    return {"loss": _mean(metrics.added_to({}))}


def _mean(sums: Sums) -> float:
    return sums["nll"] / max(sums["count"], 1)
