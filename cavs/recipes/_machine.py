"""The machine that a command runs on: its compiler, its devices, several processes, and a budget of memory."""

import contextlib
import hashlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from jax.sharding import Mesh

import cavs
from cavs.recipes._options import Mistake, Options

# On a CPU, XLA's newer code generator runs an MLIR pipeline for each of the 100 to 200 fused loops of a step. The older one
# compiles a step in half of the time, and the step is not slower: in tagging, translation and language models an epoch takes
# 0.68 to 0.9 times as long (2 cores, JAX 0.11.2, 2026-11-25). Versions of XLA that do not know the option ignore it.
_OLDER_GENERATOR = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
WORTH_KEEPING = 0.1  # programs that compile faster than this many seconds are not cached
HEARTBEAT = 20  # seconds without an answer after which a process counts as dead
# Lines of /proc/cpuinfo that describe the instruction set: on x86, on Arm, and the name of the processor.
_CPU_FIELDS = ("flags", "Features", "model name")
MSG_DISTRIBUTED = (
    "--distributed: got {!r}; expected HOST:PORT,N,I: the address of process 0, the number of processes, and the number of "
    "this one from 0, such as --distributed node1:1234,2,0; or auto, in a cluster that JAX knows, such as Slurm."
)


def prepare(training: bool) -> None:
    """Lets XLA compile quickly on a CPU, and caches compiled code in `~/.cache/cavs`. Call it before JAX starts."""
    if training:
        cavs.data.keep_host_memory()
    on_cpu = os.environ.get("JAX_PLATFORMS") == "cpu" or not Path("/dev/nvidiactl").exists()
    flags = os.environ.get("XLA_FLAGS", "")
    if on_cpu and "xla_backend_extra_options" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_OLDER_GENERATOR}".strip()
    if not training and not on_cpu:  # by default JAX takes three quarters of a GPU's memory, which takes 1.8 s on an H200
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    _keep_compiled()


def _keep_compiled() -> None:
    """Configures JAX's cache, unless the user did. The folder may be deleted at any time."""
    if jax.config.jax_compilation_cache_dir is not None or not jax.config.jax_enable_compilation_cache:  # type: ignore
        return
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cavs" / _processor()
    with contextlib.suppress(OSError):  # the home directory is not writable: compile again
        folder.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", WORTH_KEEPING)


def _processor() -> str:
    # Machines with different processors may share a home directory, and code compiled on one may not run on another.
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    facts = sorted({line for line in lines if line.partition(":")[0].strip() in _CPU_FIELDS})
    return hashlib.sha256("\n".join([os.uname().machine, *facts]).encode()).hexdigest()[:12]


def mesh_of(options: Options) -> Mesh | None:
    """The devices of a run as a mesh of one axis; `None` for one device.

    Raises:
        Mistake: JAX sees fewer devices, or a batch cannot be divided among them.
    """
    there, processes = jax.device_count(), jax.process_count()
    count = options.devices or there
    if count > there or processes > 1 and count != there:
        at_most = "at most " if processes == 1 else ""
        raise Mistake(
            f"--devices: got {count}; expected {at_most}{there}, the devices that JAX sees ({jax.default_backend()}). Write "
            "--devices 0 for all of them. For several on a CPU, set XLA_FLAGS=--xla_force_host_platform_device_count=4."
        )
    if count == 1:
        return None
    if options.batch % count:
        batch = -(-options.batch // count) * count
        raise Mistake(f"--batch: got {options.batch} for {count} devices; expected a multiple. Write --batch {batch}.")
    if options.memory != "none":
        raise Mistake(f"--memory: got {options.memory!r} with {count} devices; expected one device. Omit one of them.")
    return Mesh(jax.devices()[:count], ("data",))


@contextlib.contextmanager
def connected(to: str | None) -> Iterator[None]:
    """A context in which JAX knows the devices of all processes of a run. It must begin before JAX is used.

    If an error ends the context, the process ends at once: JAX would wait for processes that may no longer exist.

    Raises:
        Mistake: `to` is not an address, or JAX cannot connect to it.
    """
    if to is None:
        yield
        return
    parts = to.split(",")
    numbers = len(parts) == 3 and ":" in parts[0] and all(x.isdecimal() for x in parts[1:])
    if to != "auto" and not (numbers and int(parts[2]) < int(parts[1])):
        raise Mistake(MSG_DISTRIBUTED.format(to))
    given = () if to == "auto" else (parts[0], int(parts[1]), int(parts[2]))
    try:
        jax.distributed.initialize(*given, heartbeat_timeout_seconds=HEARTBEAT)  # type: ignore[arg-type]
    except (ValueError, RuntimeError) as error:
        raise Mistake(f"{MSG_DISTRIBUTED.format(to)} {error}") from error
    try:
        yield
    except Mistake as error:
        print(f"cavs train: {error}", file=sys.stderr, flush=True)
        os._exit(error.code)


def budget_of(memory: str) -> int | str | None:
    """Reads `--memory`: bytes, "min", or `None`. Raises a `Mistake`."""
    if memory == "none":
        return None
    try:
        fraction = "." in memory and memory.strip().replace(".", "").isdecimal()
        return cavs.memory.bytes_of(float(memory) if fraction else memory)
    except ValueError as error:
        raise Mistake(
            f"--memory: got {memory!r}; expected bytes such as 2GiB, a fraction of the device such as 0.5, min, or none."
        ) from error


def parts_within(budget: int | str | None, batch: int, measure: Callable[[int], int]) -> tuple[int, int | None]:
    """The fewest parts of a batch whose compiled training step fits a budget, and its bytes.

    What a step needs is nearly a + b / parts, so a line through two numbers of parts predicts the others.

    Args:
        budget: bytes; "min" for the most parts; `None` for one part, which is not measured.
        batch: the samples of a batch.
        measure: compiles the step with this many parts, and returns its bytes.

    Raises:
        Mistake: even parts of one sample do not fit.
    """
    counts = [n for n in range(1, batch + 1) if batch % n == 0]
    if budget is None:
        return 1, None
    known: dict[int, int] = {}

    def bytes_of(n: int) -> int:
        return known[n] if n in known else known.setdefault(n, measure(n))

    if not isinstance(budget, int):
        return counts[-1], bytes_of(counts[-1])
    if bytes_of(1) <= budget:
        return 1, known[1]
    if bytes_of(counts[-1]) > budget:
        least = -(-known[counts[-1]] // 1024)
        raise Mistake(f"--memory: got {budget} bytes; expected at least {least}KiB, for {batch} parts. Write --memory {least}KiB.")
    low, high = 0, len(counts) - 1  # counts[high] fits, and counts[low] does not
    while high - low > 1:
        a, b = counts[low], counts[high]
        slope = (known[a] - known[b]) / (1 / a - 1 / b)
        line = [known[b] + slope * (1 / n - 1 / b) for n in counts[low + 1 : high]]
        guess = low + 1 + next((i for i, x in enumerate(line) if x <= budget), len(line) - 1)
        low, high = (low, guess) if bytes_of(counts[guess]) <= budget else (guess, high)
    return counts[high], known[counts[high]]


def bytes_of_tree(tree: object) -> int:
    """The bytes of the arrays of a pytree."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
