"""Validates the arguments of a loader, and fills in the defaults of the device."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from cavs._feed.plan import Member, Pick
from cavs._graphs.arguments import check_takes
from cavs._graphs.checks import Index, check_choice
from cavs._graphs.counted import counted, suggestion
from cavs._graphs.graphs import Graphs, is_root
from cavs._graphs.pytree import PyTree
from cavs._schedule.schedule import Schedule
from cavs._schedule.scheduler import options_of
from cavs._schedule.shape_choice import Kinds, Options
from cavs.kernels import Target, usable_cores

GROUPS = ("balanced", "similar", "random")
LAST = ("short", "drop", "pad")
CARRIED = ("input_id", "label")  # the fields that schedules include by default
# Training steps in one dispatch on a GPU, and for batches of at most `FEW` graphs. A dispatch costs about 0.13 ms, because its
# first step does not overlap with the step before: a Tree-LSTM step (hidden 512, 16 trees, one H200, 2026-11-30) takes 163, 160
# and 157 us with 16, 32 and 64 steps. So there are up to `MORE` times as many if the batches of a dispatch are small.
STEPS, STEPS_OF_FEW, FEW, MORE = 16, 32, 8, 4
VERTICES_OF_DISPATCH = 1 << 20  # some 25 MB of schedules; three dispatches are in memory
OTHER_COUNTS = 4  # an epoch has at most about so many more or fewer batches of a shape than the first epoch
# On a CPU: at most so many training steps in one dispatch, and so many vertices. Larger batches gain nothing from it.
STEPS_ON_CPU, VERTICES_ON_CPU = 8, 32_768
AHEAD = 2  # dispatches that wait on a GPU; on a CPU the training step needs the cores
MOST = 1 << 16  # of `ahead` and `steps`: more would only fill the memory
THREADS = 16  # that schedule for a GPU, at most one for each core of this process

Source: TypeAlias = Graphs | tuple[Graphs, Pick]
GraphsOf = TypeVar("GraphsOf")  # `Graphs`, or a tuple of them
SchedOf = TypeVar("SchedOf")  # `Schedule`, or a tuple of them

# What to write for arguments of the loaders of other libraries.
_THREAD = "ahead=2 to prepare two dispatches on a thread, which schedules in place of processes, and ahead=0 for none"
ELSEWHERE = {
    "batch_size": "batches={!r}, the number of graphs of a batch",
    "num_workers": _THREAD,
    "workers": _THREAD,
    "prefetch": _THREAD,
    "prefetch_factor": _THREAD,
    "collate_fn": "collate=fn, which gets a cavs.data.Sample",
    "drop_last": "last='drop', or last='short'",
    "batch_sampler": "batches=an iterable of integer arrays, the graphs of each batch",
    "sampler": "batches=an iterable of integer arrays, the graphs of each batch",
}


class Sample(Generic[GraphsOf, SchedOf]):
    """One batch, as the `collate` of a loader receives it. With several data sets, `graphs` and `sched` are tuples.

    Its type is `Sample[Graphs, Schedule]`, or `Sample[tuple[Graphs, ...], tuple[Schedule, ...]]`.

    Attributes:
        numbers: int[B], the samples of the batch.
        present: bool[B], `False` for stand-ins of a padded last batch, whose labels must not count.
        graphs: the graphs of the batch.
        sched: its schedule.
        rows: the features of its vertices, `graphs.x`, padded.
    """

    def __init__(self, numbers: np.ndarray, present: np.ndarray, select: Callable[[], GraphsOf], sched: SchedOf):
        self.numbers, self.present, self.sched = numbers, present, sched
        self._select = select  # takes time, and a schedule may include all fields that a training step reads

    @functools.cached_property
    def graphs(self) -> GraphsOf:
        """The graphs of the batch."""
        return self._select()

    @property
    def rows(self) -> PyTree:
        """The features of the vertices, `graphs.x`, padded to (Vp, ...), as `cavs.run` reads them."""
        graphs, sched = self.graphs, self.sched
        if isinstance(graphs, tuple) and isinstance(sched, tuple):
            return tuple(jax.tree.map(s.pad, g.x) for g, s in zip(graphs, sched, strict=True))
        assert isinstance(graphs, Graphs) and isinstance(sched, Schedule)
        return jax.tree.map(sched.pad, graphs.x)


def with_sched(sample: Sample) -> PyTree:
    """The `collate` of graphs without features."""
    return sample.sched


def with_rows(sample: Sample) -> PyTree:
    """The `collate` of graphs with features: `(sched, rows)`."""
    return sample.sched, sample.rows


class Settings(NamedTuple):
    """The arguments of `Loader`. After validation, `ahead` is an int; `steps` is `None` if the loader chooses."""

    batches: int | Iterable[Index] | None
    seed: int | None
    collate: Callable[[Sample], PyTree] | None
    group: str
    last: str
    shapes: int
    steps: int | None
    ahead: int | None
    mesh: Mesh | None
    parts: int | None
    target: Target

    @property
    def units(self) -> int:
        """The devices to which a batch is dealt, or its parts."""
        return (self.parts or 1) if self.mesh is None else self.mesh.size


def refuse_others(others: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raises a `TypeError` for arguments that `Loader` does not have. `names` are those that it has."""
    for name, value in others.items():
        hint = f"Write {ELSEWHERE[name].format(value)}." if name in ELSEWHERE else suggestion(name, names)
        raise TypeError(f"Loader: {name}: got {value!r}; expected no such argument. {hint}".rstrip())


def members_of(
    graphs: Source | Sequence[Source], batches: object, fields: Sequence[str] | None, policy: str, kinds: Kinds, collated: bool
) -> tuple[list[Member], bool]:
    """Returns the data sets of a loader, and whether they were given as a sequence.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """
    several = isinstance(graphs, list) or isinstance(graphs, tuple) and not (len(graphs) == 2 and callable(graphs[1]))
    members: list[Member] = []
    sources: Any = graphs if several else (graphs,)
    for source in sources:
        data, pick = source if isinstance(source, tuple) else (source, None)
        carried = fields
        if fields is None and isinstance(data, Graphs):
            carried = carried_by(data)
        options = options_of("Loader", data, Options(policy, kinds, fields=carried or ()))
        members.append(Member(data, pick, options))
    if not members:
        raise ValueError("Loader: graphs: got no data set; expected cavs.Graphs or several of them.")
    for member in members if fields is None and not collated else ():
        if "label" in member.options.fields and _only_roots_lack_labels(member.graphs):
            raise ValueError(
                "Loader: graphs: got labels of vertices, but none of roots (all -1), which a loss of sched.label[sched.roots] "
                "takes for the last class; expected labels of roots. To train on the other vertices write "
                f"fields={tuple(member.options.fields)!r} and cavs.data.mean(losses, where=sched.label >= 0)."
            )
    lengths = {len(m.graphs) for m in members if m.pick is None}
    # A `collate`, or `pick`, says that they are several data sets, which may have one graph each.
    if len(members) > 1 and lengths == {1} and batches != 1 and not collated and all(m.pick is None for m in members):
        raise ValueError(
            f"Loader: graphs: got a list of {len(members)} data sets of one graph each; expected one data set, or data sets of "
            "equal lengths whose graphs belong together. For one data set write cavs.Graphs.concat(graphs)."
        )
    if lengths == {0}:
        raise ValueError("Loader: graphs: got no graphs; expected at least one.")
    if len(lengths) != 1:
        raise ValueError(
            f"Loader: graphs: got data sets of {sorted(lengths)} graphs; expected equal numbers. For one data set of all of "
            "these graphs write cavs.Graphs.concat(graphs). For data sets with "
            "other graphs write (graphs, pick), where pick(samples) returns the graphs of a batch."
        )
    return members, several


def carried_by(graphs: Graphs) -> list[str]:
    """Returns the fields that schedules of graphs include by default. Labels that are floats, or several numbers, are not."""
    arrays = {name: x for name in CARRIED if (x := getattr(graphs, name)) is not None}
    return [name for name, x in arrays.items() if x.dtype == np.int32 and x.ndim == 1]


def _only_roots_lack_labels(graphs: Graphs) -> bool:
    """Whether each graph has one root, no root has a label, and other vertices have."""
    assert graphs.label is not None
    if not (graphs.label < 0).any() or not (graphs.label >= 0).any() or (graphs._facts.roots != 1).any():
        return False
    return bool((graphs.label[is_root(graphs)] < 0).all())


def checked(settings: Settings, members: Sequence[Member], samples: int) -> Settings:
    """Checks the other arguments of a loader over `samples` samples, and fills in defaults.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """
    settings = settings._replace(**{k: int(x) for k, x in settings._asdict().items() if _is_integer(x)})
    batches, mesh = settings.batches, settings.mesh
    if isinstance(batches, bool | str | bytes) or not isinstance(batches, int) and not isinstance(batches, Iterable):
        raise TypeError(
            f"Loader: batches: got {batches!r}; expected an int, the graphs of a batch, or an iterable of integer arrays."
        )
    if isinstance(batches, int) and not 1 <= batches:
        raise ValueError(f"Loader: batches: got {batches}; expected an int >= 1, the number of graphs of a batch.")
    for name, choices in (("group", GROUPS), ("last", LAST)):
        check_choice(f"Loader: {name}", getattr(settings, name), choices)
    for name, least in (("seed", 0), ("shapes", 1), ("steps", 1), ("ahead", 0)):
        got = getattr(settings, name)
        most = MOST if name in ("steps", "ahead") else math.inf
        if got is not None and (isinstance(got, bool) or not isinstance(got, int) or not least <= got <= most):
            expected = f"an int >= {least}" if most > MOST else f"an int from {least} to {most}"
            raise ValueError(f"Loader: {name}: got {got!r}; expected {expected}{' or None' * (name != 'shapes')}.")
    if settings.collate is not None:
        check_takes("Loader: collate", settings.collate, "sample")
    if settings.last == "pad" and settings.collate is None and not any("label" in m.options.fields for m in members):
        raise ValueError(
            "Loader: last: got 'pad' for graphs without labels; expected labels, which are -1 for the copies, or a collate "
            "that reads sample.present. Write last='short' or last='drop'."
        )
    if mesh is not None and (not isinstance(mesh, Mesh) or len(mesh.axis_names) != 1):
        raise ValueError(
            f"Loader: mesh: got {mesh!r}; expected a jax.sharding.Mesh of one axis. Write jax.make_mesh((devices,), ('data',))."
        )
    if (parts := settings.parts) is not None:
        if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
            raise ValueError(
                f"Loader: parts: got {parts!r}; expected an int >= 1 or None, the parts of each batch. Write parts=4."
            )
        if mesh is not None:
            raise ValueError("Loader: parts: got it with a mesh; expected one of them. Write fewer graphs, or more devices.")
    if isinstance(batches, int):
        # If padded, all devices or parts get the same number of graphs, also of few samples.
        padded = -(-samples // settings.units) * settings.units if settings.last == "pad" else samples
        _check_dealt(settings, min(batches, padded), samples)
        settings = settings._replace(batches=min(batches, padded))
    if settings.collate is None and any(m.graphs.x is not None for m in members):
        settings = settings._replace(collate=with_rows)
    return settings if settings.ahead is not None else settings._replace(ahead=AHEAD if settings.target.is_gpu else 0)


def _is_integer(x: object) -> bool:
    """Whether `x` is an integer of NumPy or JAX, or an array of one, without axes."""
    return isinstance(x, np.generic | np.ndarray | jax.Array) and not x.ndim and jnp.issubdtype(x.dtype, jnp.integer)


def _check_dealt(settings: Settings, batch: int, samples: int) -> None:
    """Checks that batches of `batch` graphs can be dealt equally to devices or parts."""
    units, noun = settings.units, "parts" if settings.mesh is None else "devices"
    if samples < units and settings.last != "pad":
        raise ValueError(
            f"Loader: graphs: got {samples} for {units} {noun}; expected at least one for each. Write last='pad', if the loss "
            f"leaves out vertices whose label is -1, or fewer {noun}."
        )
    if batch % units:
        few = f" with {counted(samples, 'graph')}" * (batch != settings.batches)
        got = f"got {settings.batches}{few} for {units} {noun}"
        write = f"batches={batch // units * units}, or last='pad'" if few else f"batches={-(-batch // units) * units}"
        raise ValueError(f"Loader: batches: {got}; expected a multiple of their number. Write {write}.")
    if settings.last == "short" and samples % batch % units:
        raise ValueError(
            f"Loader: last: got 'short' with a last batch of {counted(samples % batch, 'graph')} for {units} {noun}; expected "
            "a multiple of their number. Write last='drop', or last='pad' if the loss leaves out vertices whose label is -1."
        )


def steps_on_cpu(settings: Settings, vertices: float, batches: int) -> int:
    """Returns the training steps of one dispatch on a CPU.

    Several if the batches are small, because a dispatch takes a few tenths of a millisecond.

    `vertices`: the mean number of vertices of a batch. `batches`: the batches of an epoch.
    """
    alone = settings.mesh is None and settings.parts is None
    return max(1, min(STEPS_ON_CPU, batches, int(VERTICES_ON_CPU / max(vertices, 1)))) if alone else 1


def steps_on_gpu(settings: Settings, vertices: float, batch: int, of_shape: np.ndarray) -> int:
    """Returns the training steps of one dispatch on a GPU: many, but such that few batches are left over.

    The number is a multiple of four, the steps of one CUDA graph. A batch that is left over costs about as much as a dispatch.

    `vertices`: the mean number of vertices of a batch. `batch`: its graphs. `of_shape`: (shapes,) batches of the first epoch.
    """
    steps = most = STEPS if batch > FEW else STEPS_OF_FEW
    if settings.collate is None:  # which may add large arrays
        most = int(np.clip(VERTICES_OF_DISPATCH / max(vertices, 1), steps, MORE * steps))
    choices = np.array([n for n in range(steps - 4, most + 9, 4) if n <= of_shape.sum()] or [max(1, of_shape.sum())])
    drawn = OTHER_COUNTS if settings.seed is not None and (of_shape > 1).sum() > 1 else 0
    counts = np.maximum(of_shape[:, None] + np.arange(-drawn, drawn + 1), 0).ravel()
    dispatches = (counts // choices[:, None] + counts % choices[:, None]).sum(1)
    return int(choices[dispatches.argmin()])


def threads_of(settings: Settings) -> int:
    """Returns the threads that schedule the batches of a dispatch. On a CPU the training step needs the cores."""
    return min(THREADS, usable_cores()) if settings.target.is_gpu else 1
