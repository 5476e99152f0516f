"""Networks of images, in float32 and plain JAX: ResNet, VGG-16, DenseNet-161 and YOLO-v3's Darknet-53.

```python
network = resnet((3, 4, 6, 3))  # ResNet-50
params = network.init(jax.random.key(0))
images, labels = network.batch(jax.random.key(1), 32)
value = network.loss(params, images, labels, conv3=cavs.conv)
```
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array
Conv = Callable[[Array, Array], Array]
Remat = Callable[[Callable[..., Any]], Callable[..., Any]]


def identity(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def conv(x: Array, w: Array, stride: int | tuple[int, int] = 1, precision: Any = None) -> Array:
    """XLA's convolution."""
    strides, dims = (stride, stride) if isinstance(stride, int) else stride, ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, strides, "SAME", dimension_numbers=dims, precision=precision)


class Ops(NamedTuple):
    """What a block runs: `conv3` for filters of 3 x 3 with stride 1, `conv` for all others, norms, and products."""

    conv3: Conv
    conv: Callable[..., Array]
    scaled: Callable[[Array], Array]
    precision: Any

    def __call__(self, x: Array, w: Array, stride: int = 1) -> Array:
        return self.conv3(x, w) if stride == 1 and w.shape[:2] == (3, 3) else self.conv(x, w, stride)

    def norm(self, x: Array, p: Any) -> Array:
        return self.scaled(x) * p[0] + p[1]

    def product(self, x: Array, w: Array) -> Array:
        return jnp.matmul(x, w, precision=self.precision)


class Block(NamedTuple):
    """A part of a network: the shapes of its filters (4), matrices (2), normalisations and biases (1), and what it computes."""

    shapes: dict[str, tuple[int, ...]]
    apply: Callable[[dict[str, Any], Array, Ops], Array]


@dataclass(frozen=True)
class Network:
    """A chain of blocks. `side`: pixels of the images (VGG-16 takes 224 alone); `classes`: the number of labels."""

    name: str
    blocks: tuple[Block, ...]
    side: int = 224
    classes: int = 1000
    norm: str = "batch"  # or "group": eight groups of channels, so that an image does not depend on others

    def init(self, key: Array) -> list[dict[str, Any]]:
        """Draws parameters (He et al.)."""
        keys = jax.random.split(key, len(self.blocks))
        return [_init(block.shapes, k) for block, k in zip(self.blocks, keys, strict=True)]

    def batch(self, key: Array, count: int) -> tuple[Array, Array]:
        """Draws images and labels."""
        images = jax.random.normal(key, (count, self.side, self.side, 3))
        return images, jax.random.randint(key, (count,), 0, self.classes)

    def loss(self, params: Sequence[Any], images: Array, labels: Array, conv3: Conv | None = None, **how: Any) -> Array:
        """Returns the mean of `losses`."""
        return self.losses(params, images, labels, conv3, **how).mean()

    def losses(
        self,
        params: Sequence[Any],
        images: Array,
        labels: Array,
        conv3: Conv | None = None,
        precision: Any = None,
        remat: Remat = identity,
    ) -> Array:
        """Returns the cross entropy of each image.

        Args:
            params: as `init` returns them.
            images: (batch, side, side, 3).
            labels: (batch,).
            conv3: runs convolutions of 3 x 3 with stride 1 and padding "SAME"; XLA by default.
            precision: of the other convolutions and products.
            remat: wraps each block, for example `jax.checkpoint`.
        """
        xla_conv = partial(conv, precision=precision)
        normal = partial(scaled, axes=(0, 1, 2)) if self.norm == "batch" else partial(group_scaled, groups=8)
        ops, x = Ops(conv3 or xla_conv, xla_conv, normal, precision), images
        for block, p in zip(self.blocks, params, strict=True):
            x = remat(lambda p, x, apply=block.apply: apply(p, x, ops))(p, x)
        return -jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], -1)[:, 0]


def _init(shapes: dict[str, tuple[int, ...]], key: Array) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for (name, shape), k in zip(shapes.items(), jax.random.split(key, len(shapes) or 1), strict=False):
        if len(shape) == 1:
            params[name] = (jnp.ones(shape), jnp.zeros(shape)) if name.startswith("norm") else jnp.zeros(shape)
        else:
            params[name] = jax.random.normal(k, shape) * (2 / math.prod(shape[:-1])) ** 0.5
    return params


def scaled(x: Array, axes: tuple[int, ...]) -> Array:
    """Returns values of mean 0 and variance 1 over these axes."""
    mean = x.mean(axes, keepdims=True)
    return (x - mean) * lax.rsqrt(((x - mean) ** 2).mean(axes, keepdims=True) + 1e-5)


def group_scaled(x: Array, groups: int) -> Array:
    """Does the same over all pixels and each of these groups of channels."""
    return scaled(x.reshape(*x.shape[:3], groups, -1), (1, 2, 4)).reshape(x.shape)


def pool(x: Array, size: int, stride: int, padding: str = "SAME") -> Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, size, size, 1), (1, stride, stride, 1), padding)


def _head(channels: int, classes: int) -> Block:
    def apply(p: Any, x: Array, ops: Ops) -> Array:
        return ops.product(x.mean((1, 2)), p["w"]) + p["b"]

    return Block({"w": (channels, classes), "b": (classes,)}, apply)


# --- ResNet (He et al., 2016).


def resnet(counts: Sequence[int], classes: int = 1000, width: int = 64) -> Network:
    """ResNet with bottleneck blocks, as many in each stage as `counts` says."""
    blocks, channels = [Block({"w": (7, 7, 3, width), "norm": (width,)}, _resnet_stem)], width
    for stage, count in enumerate(counts):
        for n in range(count):
            blocks.append(_bottleneck(channels, width << stage, 2 if stage and not n else 1))
            channels = 4 * width << stage
    return Network(f"ResNet-{3 * sum(counts) + 2}", (*blocks, _head(channels, classes)), classes=classes)


def _resnet_stem(p: Any, x: Array, ops: Ops) -> Array:
    return pool(jax.nn.relu(ops.norm(ops(x, p["w"], 2), p["norm"])), 3, 2)


def _bottleneck(channels: int, width: int, stride: int) -> Block:
    out = 4 * width
    filters = [(1, 1, channels, width), (3, 3, width, width), (1, 1, width, out)]
    shapes: dict[str, tuple[int, ...]] = {f"w{i}": shape for i, shape in enumerate(filters)}
    shapes |= {f"norm{i}": shape[-1:] for i, shape in enumerate(filters)}
    shapes |= {"skip": (1, 1, channels, out), "norm": (out,)} if stride > 1 or channels != out else {}

    def apply(p: Any, x: Array, ops: Ops) -> Array:
        y = x
        for i, step in enumerate((1, stride, 1)):
            y = jax.nn.relu(y) if i else y
            y = ops.norm(ops(y, p[f"w{i}"], step), p[f"norm{i}"])
        return jax.nn.relu(y + (ops.norm(ops(x, p["skip"], stride), p["norm"]) if "skip" in p else x))

    return Block(shapes, apply)


# --- VGG (Simonyan and Zisserman, 2015).


def vgg16(classes: int = 1000) -> Network:
    """VGG-16, without dropout."""
    blocks, channels = [], 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for n in range(count):
            blocks.append(Block({"w": (3, 3, channels, width), "b": (width,)}, partial(_convolved, pooled=n == count - 1)))
            channels = width
    blocks += [Block({"w": (n, 4096), "b": (4096,)}, _dense) for n in (7 * 7 * 512, 4096)]
    blocks.append(Block({"w": (4096, classes), "b": (classes,)}, partial(_dense, last=True)))
    return Network("VGG-16", tuple(blocks), classes=classes)


def _convolved(p: Any, x: Array, ops: Ops, pooled: bool = False) -> Array:
    x = jax.nn.relu(ops(x, p["w"]) + p["b"])
    return pool(x, 2, 2, "VALID") if pooled else x


def _dense(p: Any, x: Array, ops: Ops, last: bool = False) -> Array:
    x = ops.product(x.reshape(len(x), -1), p["w"]) + p["b"]
    return x if last else jax.nn.relu(x)


# --- DenseNet-161 (Huang et al., 2017).


def densenet161(classes: int = 1000) -> Network:
    """DenseNet-161: growth 48."""
    blocks, channels = [Block({"w": (7, 7, 3, 96), "norm": (96,)}, _resnet_stem)], 96
    for stage, count in enumerate((6, 12, 36, 24)):
        for _ in range(count):
            shapes = {"w0": (1, 1, channels, 192), "w1": (3, 3, 192, 48), "norm0": (channels,), "norm1": (192,)}
            blocks.append(Block(shapes, _dense_layer))
            channels += 48
        if stage < 3:
            blocks.append(Block({"w": (1, 1, channels, channels // 2), "norm": (channels,)}, _transition))
            channels //= 2
    last = Block({"norm": (channels,)}, lambda p, x, ops: jax.nn.relu(ops.norm(x, p["norm"])))
    return Network("DenseNet-161", (*blocks, last, _head(channels, classes)), classes=classes)


def _dense_layer(p: Any, x: Array, ops: Ops) -> Array:
    y = ops(jax.nn.relu(ops.norm(x, p["norm0"])), p["w0"])
    return jnp.concatenate([x, ops(jax.nn.relu(ops.norm(y, p["norm1"])), p["w1"])], -1)


def _transition(p: Any, x: Array, ops: Ops) -> Array:
    x = ops(jax.nn.relu(ops.norm(x, p["norm"])), p["w"])
    return lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4


# --- Darknet-53, the body of YOLO v3 (Redmon and Farhadi, 2018).


def darknet53(classes: int = 1000) -> Network:
    """Darknet-53 as a classifier of images of 256 x 256."""
    blocks, channels = [Block({"w": (3, 3, 3, 32), "norm": (32,)}, _leaky)], 32
    for count in (1, 2, 8, 8, 4):
        blocks.append(Block({"w": (3, 3, channels, 2 * channels), "norm": (2 * channels,)}, partial(_leaky, stride=2)))
        channels *= 2
        half = channels // 2
        shapes = {"w0": (1, 1, channels, half), "w1": (3, 3, half, channels), "norm0": (half,), "norm1": (channels,)}
        blocks += [Block(shapes, _darknet_block)] * count
    return Network("Darknet-53", (*blocks, _head(channels, classes)), side=256, classes=classes)


def _leaky(p: Any, x: Array, ops: Ops, stride: int = 1, n: str = "") -> Array:
    return jax.nn.leaky_relu(ops.norm(ops(x, p[f"w{n}"], stride), p[f"norm{n}"]), 0.1)


def _darknet_block(p: Any, x: Array, ops: Ops) -> Array:
    return x + _leaky(p, _leaky(p, x, ops, n="0"), ops, n="1")


NETWORKS: dict[str, Callable[[], Network]] = {
    "resnet50": partial(resnet, (3, 4, 6, 3)), "resnet152": partial(resnet, (3, 8, 36, 3)), "vgg16": vgg16,
    "densenet161": densenet161, "darknet53": darknet53,
}  # fmt: skip
