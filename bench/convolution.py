"""Suite `convolution`: the layers of MegaKernels' Table 2, and training steps of ResNet-50, in float32.

Peers: XLA's convolution, and PyTorch's in NCHW and NHWC with `cudnn.benchmark`, which times all of cuDNN's algorithms. TF32 is
off.
"""

import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import cavs
from bench import device_time
from cavs._convolution import conv as conv_module, layouts
from cavs.kernels import ConvolutionSizes, Target, convolve
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
    found = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(times):
            y = run()
        finish(y)
        found.append((time.perf_counter() - start) / times)
    return min(found)


def direct(x: jax.Array, w: jax.Array, precision: str = "highest") -> jax.Array:
    """XLA's convolution."""
    return lax.conv_general_dilated(x, w, (1, 1), SAME, dimension_numbers=("NHWC", "HWIO", "NHWC"), precision=precision)


def errors(channels: int, outputs: int, side: int) -> dict[str, float]:
    """The root mean square errors against float64 of a direct convolution in float32, and of `cavs.conv`."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((FEW, side, side, channels)), rng.standard_normal((3, 3, channels, outputs))
    x, w = (np.asarray(a, np.float32) for a in (x, w))
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        true = np.asarray(jax.jit(direct)(x.astype(np.float64), w.astype(np.float64)))
    found = {"direct": jax.jit(direct)(x, w)}
    for m in (4, 2):
        s = ConvolutionSizes.of(x.shape, outputs, SAME, m)
        layout = layouts.layout(s, min(4, s.groups), Target.here())
        found[f"F({m}x{m})"] = jax.jit(functools.partial(convolve, padding=SAME, layout=layout))(x, w)
    return {name: float(np.sqrt(np.mean((np.asarray(y, np.float64) - true) ** 2))) for name, y in found.items()}


def of_torch(channels: int, outputs: int, side: int) -> dict[str, float]:
    """Microseconds of PyTorch, by memory format; empty without PyTorch."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        return {}
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    found = {}
    for name, form in (("torch NCHW", torch.contiguous_format), ("torch NHWC", torch.channels_last)):
        x = torch.randn(BATCH, channels, side, side, device="cuda").to(memory_format=form)
        w = torch.randn(outputs, channels, 3, 3, device="cuda").to(memory_format=form)
        run = functools.partial(torch.nn.functional.conv2d, x, w, padding=1)
        found[name] = 1e6 * seconds(run, lambda _: torch.cuda.synchronize())
    torch.cuda.empty_cache()
    return found


def in_launches(fn: Callable[..., Any], *args: jax.Array) -> float:
    """Microseconds of the launches alone."""
    jax.block_until_ready(fn(*args))
    events = device_time.of_jax(lambda: jax.block_until_ready([fn(*args) for _ in range(5)]))
    return sum(end - start for name, start, end in events if name.startswith("cavs_convolution")) / 5e3


def layer(name: str) -> dict[str, Any]:
    """Measures one layer: peers, `cavs.conv`, its stages in separate launches, other precisions, and errors."""
    outputs, channels, side = LAYERS[name]
    x = jax.random.normal(jax.random.key(0), (BATCH, side, side, channels))
    w = jax.random.normal(jax.random.key(1), (3, 3, channels, outputs))
    time_of = lambda fn: 1e6 * seconds(functools.partial(jax.jit(fn), x, w), jax.block_until_ready)  # noqa: E731
    found: dict[str, Any] = {"layer": name, "K": outputs, "C": channels, "H": side}
    found |= {"XLA": time_of(direct), "cavs": time_of(functools.partial(cavs.conv, precision="highest"))}
    found |= {"XLA tf32": time_of(functools.partial(direct, precision="tensorfloat32"))}
    found |= of_torch(channels, outputs, side)
    choice = conv_module._choice(x.shape, outputs, SAME)
    best = min((n for n in choice.times if n != layouts.XLA), key=choice.times.__getitem__)
    s = ConvolutionSizes.of(x.shape, outputs, SAME, 4)
    layout = layouts.candidates(s, Target.here())[best]
    found |= {"chosen": best if choice.layout else "XLA", "tried": choice.times}
    found["fused"] = in_launches(jax.jit(functools.partial(convolve, padding=SAME, layout=layout)), x, w)
    found["stages"] = in_launches(jax.jit(functools.partial(convolve_in_stages, padding=SAME, layout=layout)), x, w)
    found["errors"] = errors(channels, outputs, side)
    return found


# --- ResNet-50.

Conv = Callable[[jax.Array, jax.Array], jax.Array]
DEPTHS, WIDTHS = (3, 4, 6, 3), (64, 128, 256, 512)


def resnet_blocks() -> Iterator[tuple[int, int, int]]:
    """(input channels, width, stride) of each bottleneck block."""
    channels = 64
    for depth, width in zip(DEPTHS, WIDTHS, strict=True):
        for n in range(depth):
            yield channels, width, 2 if n == 0 and width > 64 else 1
            channels = 4 * width


def resnet_params(key: jax.Array) -> dict[str, Any]:
    """Draws the parameters."""
    keys = iter(jax.random.split(key, 200))
    filters = lambda *shape: jax.random.normal(next(keys), shape) / np.sqrt(np.prod(shape[:3]) / 2)  # noqa: E731
    norm = lambda c: (jnp.ones(c), jnp.zeros(c))  # noqa: E731
    blocks = []
    for c, width, stride in resnet_blocks():
        block = {"a": filters(1, 1, c, width), "b": filters(3, 3, width, width), "c": filters(1, 1, width, 4 * width)}
        block |= {"na": norm(width), "nb": norm(width), "nc": norm(4 * width)}
        if stride > 1 or c != 4 * width:
            block |= {"d": filters(1, 1, c, 4 * width), "nd": norm(4 * width)}
        blocks.append(block)
    return {
        "stem": filters(7, 7, 3, 64),
        "norm": norm(64),
        "blocks": blocks,
        "out": jax.random.normal(next(keys), (2048, 1000)) / 45,
    }


def resnet_loss(params: dict[str, Any], images: jax.Array, labels: jax.Array, conv3: Conv) -> jax.Array:
    """The loss of ResNet-50 with batch normalisation; `conv3` runs convolutions of 3 x 3 with stride 1."""

    def plain(x: jax.Array, w: jax.Array, stride: int = 1) -> jax.Array:
        dims = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=dims, precision="highest")

    def norm(x: jax.Array, scale: tuple[jax.Array, jax.Array]) -> jax.Array:
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        return (x - mean) * lax.rsqrt(var + 1e-5) * scale[0] + scale[1]

    x = jax.nn.relu(norm(plain(images, params["stem"], 2), params["norm"]))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    for p, (_, _, stride) in zip(params["blocks"], resnet_blocks(), strict=True):
        y = jax.nn.relu(norm(plain(x, p["a"]), p["na"]))
        y = plain(y, p["b"], stride) if stride > 1 else conv3(y, p["b"])
        y = norm(plain(jax.nn.relu(norm(y, p["nb"])), p["c"]), p["nc"])
        x = jax.nn.relu(y + (norm(plain(x, p["d"], stride), p["nd"]) if "d" in p else x))
    logits = jnp.matmul(x.mean((1, 2)), params["out"], precision="highest")
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1))


def resnet(batch: int = 64, side: int = 224) -> dict[str, Any]:
    """Milliseconds of a training step with XLA's convolutions and with `cavs.conv`, and how far their gradients differ."""
    params = resnet_params(jax.random.key(0))
    images, labels = jax.random.normal(jax.random.key(1), (batch, side, side, 3)), jnp.arange(batch) % 1000
    found: dict[str, Any] = {"batch": batch}
    grads = {}
    for name, conv3 in (("XLA", direct), ("cavs", functools.partial(cavs.conv, precision="highest"))):
        step = jax.jit(jax.value_and_grad(functools.partial(resnet_loss, conv3=conv3)))
        loss, grads[name] = step(params, images, labels)
        run = functools.partial(step, params, images, labels)
        found |= {f"{name} ms": 1e3 * seconds(run, jax.block_until_ready, 3), f"{name} loss": float(loss)}
    # How far rounding alone moves the gradients: each pixel changes in its last bit.
    grads["moved"] = step(params, images * (1 + 2**-23), labels)[1]
    norm = lambda tree: np.sqrt(sum(float(jnp.sum(x**2)) for x in jax.tree.leaves(tree)))  # noqa: E731
    for name, one, other in (("difference", "XLA", "cavs"), ("difference by rounding", "cavs", "moved")):
        found[name] = norm(jax.tree.map(jnp.subtract, grads[one], grads[other])) / norm(grads["XLA"])
    return found


def main(folder: Path, limit: float, names: list[str]) -> None:
    """Measures everything, prints it, and saves it after each layer; stops beginning layers after `limit` seconds."""
    start, found = time.perf_counter(), []
    device = jax.devices()[0].device_kind
    if not Target.here().is_hopper:
        raise SystemExit(f"bench convolution: JAX runs on {device}; expected a Hopper GPU")
    network = resnet()
    print(json.dumps(network), flush=True)
    for name in names or LAYERS:
        if time.perf_counter() - start < limit:
            found.append(layer(name))
            print(json.dumps(found[-1]), flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        record = {
            "device": device,
            "jax": jax.__version__,
            "date": time.strftime("%Y-%m-%d"),
            "resnet50": network,
            "layers": found,
        }
        (folder / f"convolution-{device.lower().replace(' ', '-')}.json").write_text(json.dumps(record, indent=1) + "\n")
