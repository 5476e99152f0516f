"""Suite `convolution`: the layers of MegaKernels' Table 2, their gradients, and steps of networks, in float32.

Peers: XLA's convolution, and PyTorch's in NCHW and NHWC with `cudnn.benchmark`, which times all of cuDNN's algorithms. TF32 is
off.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cavs
from bench import device_time
from bench.networks import NETWORKS
from cavs._convolution.choice import Operation
from cavs._convolution.primitives import CONVOLUTION, FILTERS, by_xla, chosen, conv, conv_filters
from cavs.kernels import ConvolutionSizes, Target
from cavs.kernels._tasks.convolution import convolve_in_stages

# K, C, and H = W: Table 2.
LAYERS = {
    "ResNet-1": (64, 64, 56),
    "ResNet-2": (128, 128, 28),
    "ResNet-3": (256, 256, 14),
    "ResNet-4": (512, 512, 7),
    "YOLOv3-1": (64, 32, 128),
    "YOLOv3-2": (128, 64, 64),
    "YOLOv3-3": (256, 128, 32),
    "YOLOv3-4": (512, 256, 16),
    "YOLOv3-5": (1024, 512, 8),
    "VGG-1": (128, 128, 112),
    "VGG-2": (256, 256, 56),
    "VGG-3": (512, 512, 28),
    "DenseNet": (48, 192, 56),
}
BATCH, FEW = 64, 2  # images of a layer, and of a comparison with float64
SAME = ((1, 1), (1, 1))


def seconds(run: Callable[[], Any], finish: Callable[[Any], Any], times: int = 10) -> float:
    """The best of three means."""
    finish(run())
    means = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(times):
            y = run()
        finish(y)
        means.append((time.perf_counter() - start) / times)
    return min(means)


def draw(shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Random operands."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def in_float64(operation: Operation, operands: Sequence[np.ndarray]) -> np.ndarray:
    """What XLA computes on the CPU."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        run = jax.jit(functools.partial(operation.by_xla, pads=SAME))
        return np.asarray(run(*(x.astype(np.float64) for x in operands)))


def of_torch(operation: Operation, outputs: int, channels: int, side: int) -> dict[str, float]:
    """Microseconds of PyTorch, by memory format; empty if it is not installed, or only for CPUs."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        return {}
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    times = {}
    for name, form in (("torch NCHW", torch.contiguous_format), ("torch NHWC", torch.channels_last)):
        draw = lambda *shape, form=form: torch.randn(*shape, device="cuda").to(memory_format=form)  # noqa: E731
        x, w = draw(BATCH, channels, side, side), draw(outputs, channels, 3, 3)
        run = functools.partial(torch.nn.functional.conv2d, x, w, padding=1)
        if operation is FILTERS:
            dy, ones = draw(BATCH, outputs, side, side), [1, 1]
            backward = torch.ops.aten.convolution_backward
            run = functools.partial(backward, dy, x, w, None, ones, ones, ones, False, [0, 0], 1, [False, True, False])
        times[name] = 1e6 * seconds(run, lambda _: torch.cuda.synchronize())
    torch.cuda.empty_cache()
    return times


def launches(fn: Callable[..., Any], *args: jax.Array, times: int = 5) -> list[float]:
    """Microseconds of each of the function's launches."""
    jax.block_until_ready(fn(*args))
    events = device_time.of_jax(lambda: jax.block_until_ready([fn(*args) for _ in range(times)]))
    intervals = [(start, end - start) for name, start, end in events if name.startswith("cavs_convolution")]
    durations = np.array([time for _, time in sorted(intervals)]).reshape(times, -1)
    return [round(float(us), 1) for us in np.median(durations, 0) / 1e3]


def layer(operation: Operation, name: str) -> dict[str, Any]:
    """Measures a layer, or its gradient with respect to the filters: peers, Cavs, and errors on few images."""
    outputs, channels, side = LAYERS[name]
    s = ConvolutionSizes(BATCH, side, side, channels, outputs, SAME, 4)
    operands = [jnp.asarray(x) for x in draw(operation.shapes(s))]
    time_of = lambda fn: 1e6 * seconds(functools.partial(jax.jit(fn), *operands), jax.block_until_ready)  # noqa: E731
    choice = chosen(operation, operands[0].shape, outputs, SAME)
    run = functools.partial(conv if operation is CONVOLUTION else conv_filters, pads=SAME, forced=False)
    record: dict[str, Any] = {"layer": name, "K": outputs, "C": channels, "H": side}
    record |= {"XLA": time_of(functools.partial(operation.by_xla, pads=SAME)), "cavs": time_of(run)}
    record |= of_torch(operation, outputs, channels, side)
    if operation is CONVOLUTION:
        record["XLA tf32"] = time_of(functools.partial(by_xla, pads=SAME, precision="tensorfloat32"))
    record |= {"chosen": min(choice.times, key=choice.times.__getitem__), "tried": choice.times}
    layouts = operation.layouts(s, Target.here())
    best = min(layouts, key=lambda n: choice.times[n])
    record["launch"] = launches(jax.jit(functools.partial(operation.launch, pads=SAME, layout=layouts[best])), *operands)[0]
    if operation is CONVOLUTION:
        staged = functools.partial(convolve_in_stages, padding=SAME, layout=layouts[best])
        record["stages"] = launches(jax.jit(staged), *operands)
    few_operands = draw(operation.shapes(dataclasses.replace(s, images=FEW)))
    results = {"direct": jax.jit(functools.partial(operation.by_xla, pads=SAME))(*few_operands)}
    for m in (4, 2):
        layout = dataclasses.replace(layouts[best], m=m)
        results[f"F({m}x{m})"] = jax.jit(functools.partial(operation.launch, pads=SAME, layout=layout))(*few_operands)
    true = in_float64(operation, few_operands)
    rms = lambda y: float(np.sqrt(np.mean((np.asarray(y, np.float64) - true) ** 2)))  # noqa: E731
    return record | {"errors": {name: rms(y) for name, y in results.items()}}


def network(name: str) -> dict[str, Any]:
    """Milliseconds of a training step with XLA's convolutions and with `cavs.conv`, and how far their gradients differ."""
    net, batch = NETWORKS[name](), 32 if name == "densenet161" else BATCH
    params, (images, labels) = net.init(jax.random.key(0)), net.batch(jax.random.key(1), batch)
    record: dict[str, Any] = {"network": net.name, "batch": batch}
    grads = {}
    convs = {"XLA": functools.partial(by_xla, pads=SAME), "cavs": functools.partial(cavs.conv, precision="highest")}
    for label, conv3 in convs.items():
        step = jax.jit(jax.value_and_grad(functools.partial(net.loss, conv3=conv3, precision="highest")))
        loss, grads[label] = step(params, images, labels)
        run = functools.partial(step, params, images, labels)
        record |= {f"{label} ms": 1e3 * seconds(run, jax.block_until_ready, 3), f"{label} loss": float(loss)}
    # How far rounding alone moves the gradients: each pixel changes in its last bit.
    grads["moved"] = step(params, images * (1 + 2**-23), labels)[1]
    norm = lambda tree: np.sqrt(sum(float(jnp.sum(x**2)) for x in jax.tree.leaves(tree)))  # noqa: E731
    for label, first, second in (("difference", "XLA", "cavs"), ("difference by rounding", "cavs", "moved")):
        record[label] = norm(jax.tree.map(jnp.subtract, grads[first], grads[second])) / norm(grads["XLA"])
    return record


PARTS: dict[str, tuple[Callable[[str], dict[str, Any]], Sequence[str]]] = {
    "layers": (functools.partial(layer, CONVOLUTION), tuple(LAYERS)),
    "filters": (functools.partial(layer, FILTERS), tuple(LAYERS)),
    "networks": (network, ("resnet50", "vgg16", "darknet53", "densenet161")),
}


def main(folder: Path, limit: float, names: list[str]) -> None:
    """Measures parts, or single names of them ("layers", "layers:VGG-1"). Prints and saves each record at once.

    After `limit` seconds nothing more begins. Earlier records of this kind of device stay until they are measured again.
    """
    start, device = time.perf_counter(), jax.devices()[0].device_kind
    if not Target.here().is_hopper:
        raise SystemExit(f"bench convolution: JAX runs on {device}; expected a Hopper GPU")
    file = folder / f"convolution-{device.lower().replace(' ', '-')}.json"
    records = json.loads(file.read_text()) if file.exists() else {"device": device}
    for part, name in _selected(names):
        if time.perf_counter() - start > limit:
            break
        record = {**PARTS[part][0](name), "jax": jax.__version__, "date": time.strftime("%Y-%m-%d")}
        print(part, json.dumps(record), flush=True)
        records.setdefault(part, {})[name] = record
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(records, indent=1) + "\n")
        jax.clear_caches()  # compiled programs hold memory


def _selected(names: list[str]) -> Iterator[tuple[str, str]]:
    for name in names or PARTS:
        part, _, single = name.partition(":")
        if part not in PARTS or (single and single not in PARTS[part][1]):
            known = ", ".join(f"{part} ({', '.join(of)})" for part, (_, of) in PARTS.items())
            raise SystemExit(f"bench convolution: got {name!r}; expected a part, or part:name, of {known}")
        yield from ((part, of) for of in ([single] if single else PARTS[part][1]))
