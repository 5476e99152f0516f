"""The Triton kernels of `torch_triton`: all of a level of a Tree-LSTM or Tree-FC that is not a product, and the head.

A program is one row and `BLOCK` columns. Rows of `gates`, `z` and the like lie end to end, `width` columns a gate.
"""

import triton
import triton.language as tl

BLOCK, WARPS = 256, 2  # columns of one program: four a thread
# Arguments that differ from level to level, and indices that lie at any place of one transfer: no new kernel for each.
ANY = {
    "do_not_specialize": ("first", "leaves", "graphs"),
    "do_not_specialize_on_alignment": ("left", "right", "at", "to", "labels", "slot"),
}


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def leaf_up(gates, h, c, width: tl.constexpr, BLOCK: tl.constexpr):
    """Leaves: `gates` before their activation become the gates i, o, u."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = j < width
    g = gates + row * 3 * width + j
    i, o, u = tl.sigmoid(tl.load(g, m)), tl.sigmoid(tl.load(g + width, m)), _tanh(tl.load(g + 2 * width, m))
    cell = i * u
    tl.store(g, i, m)
    tl.store(g + width, o, m)
    tl.store(g + 2 * width, u, m)
    tl.store(c + row * width + j, cell, m)
    tl.store(h + row * width + j, o * _tanh(cell), m)


@triton.jit(**ANY)
def inner_up(z, gates, f, h, c, b_iou, b_f, left, right, first, leaves, width: tl.constexpr, BLOCK: tl.constexpr):
    """Row `first` + k: the children's products to gates, c and h; a child's forget gate lies in the child's row of `f`."""
    row = tl.program_id(0).to(tl.int64) + first
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = j < width
    a, b = tl.load(left + row - leaves), tl.load(right + row - leaves)
    za, zb, bias = z + a * 4 * width + j, z + b * 4 * width + j, b_iou + j
    i = tl.sigmoid(tl.load(za, m) + tl.load(zb, m) + tl.load(bias, m))
    o = tl.sigmoid(tl.load(za + width, m) + tl.load(zb + width, m) + tl.load(bias + width, m))
    u = _tanh(tl.load(za + 2 * width, m) + tl.load(zb + 2 * width, m) + tl.load(bias + 2 * width, m))
    forget = tl.load(b_f + j, m)
    fa = tl.sigmoid(tl.load(za + 3 * width, m) + forget)
    fb = tl.sigmoid(tl.load(zb + 3 * width, m) + forget)
    cell = i * u + fa * tl.load(c + a * width + j, m) + fb * tl.load(c + b * width + j, m)
    g = gates + row * 3 * width + j
    tl.store(g, i, m)
    tl.store(g + width, o, m)
    tl.store(g + 2 * width, u, m)
    tl.store(f + a * width + j, fa, m)
    tl.store(f + b * width + j, fb, m)
    tl.store(c + row * width + j, cell, m)
    tl.store(h + row * width + j, o * _tanh(cell), m)


@triton.jit
def _gates_down(gates, dh, dc, c, row, j, m, width: tl.constexpr):
    """Cotangents of (i, o, u) before their activation, and of c."""
    g = gates + row * 3 * width + j
    i, o, u = tl.load(g, m), tl.load(g + width, m), tl.load(g + 2 * width, m)
    t = _tanh(tl.load(c + row * width + j, m))
    d = tl.load(dh + row * width + j, m)
    cell = tl.load(dc + row * width + j, m) + d * o * (1 - t * t)
    return cell * u * i * (1 - i), d * t * o * (1 - o), cell * i * (1 - u * u), cell


@triton.jit(**ANY)
def inner_down(dz, gates, f, dh, dc, c, left, right, first, leaves, width: tl.constexpr, BLOCK: tl.constexpr):
    """Row `first` + k: what its children's products and c's receive."""
    row = tl.program_id(0).to(tl.int64) + first
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = j < width
    di, do, du, cell = _gates_down(gates, dh, dc, c, row, j, m, width)
    for side in tl.static_range(2):
        if side == 0:
            kid = tl.load(left + row - leaves)
        else:
            kid = tl.load(right + row - leaves)
        forget, below = tl.load(f + kid * width + j, m), tl.load(c + kid * width + j, m)
        to = dz + kid * 4 * width + j
        tl.store(to, di, m)
        tl.store(to + width, do, m)
        tl.store(to + 2 * width, du, m)
        tl.store(to + 3 * width, cell * below * forget * (1 - forget), m)
        tl.store(dc + kid * width + j, cell * forget, m)


@triton.jit
def leaf_down(gates, dh, dc, c, width: tl.constexpr, BLOCK: tl.constexpr):
    """Leaves: the gates become their cotangents before the activation."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = j < width
    di, do, du, _ = _gates_down(gates, dh, dc, c, row, j, m, width)
    g = gates + row * 3 * width + j
    tl.store(g, di, m)
    tl.store(g + width, do, m)
    tl.store(g + 2 * width, du, m)


@triton.jit(**ANY)
def head(
    h,
    at,
    to,
    w,
    b,
    labels,
    dh,
    hs,
    d,
    loss,
    graphs,
    width: tl.constexpr,
    classes: tl.constexpr,
    H: tl.constexpr,
    C: tl.constexpr,
):
    """Graph g: loss of row at[g] of `h`; that row to `hs`, its cotangent to row to[g] of `dh`; `d`: the logits' cotangents."""
    g = tl.program_id(0)
    j, k = tl.arange(0, H), tl.arange(0, C)
    mj, mk = j < width, k < classes
    x = tl.load(h + tl.load(at + g) * width + j, mj, 0.0)
    weight = tl.load(w + j[:, None] * classes + k[None, :], mj[:, None] & mk[None, :], 0.0)
    logits = tl.where(mk, tl.sum(x[:, None] * weight, 0) + tl.load(b + k, mk, 0.0), float("-inf"))
    shifted = logits - tl.max(logits, 0)
    total = tl.sum(tl.exp(shifted), 0)
    hit = k == tl.load(labels + g)
    tl.store(loss + g, tl.log(total) - tl.sum(tl.where(hit, shifted, 0.0), 0))
    delta = (tl.exp(shifted) / total - tl.where(hit, 1.0, 0.0)) / graphs
    tl.store(d + g * classes + k, delta, mk)
    tl.store(hs + g * width + j, x, mj)
    tl.store(dh + tl.load(to + g) * width + j, tl.sum(weight * tl.where(mk, delta, 0.0)[None, :], 1), mj)


@triton.jit(**ANY)
def fc_up(z, b, operand, slot, first, width: tl.constexpr, BLOCK: tl.constexpr):
    """Row k of a level's products to h, in the half of its parent's operand that is row slot[`first` + k]."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = j < width
    h = _tanh(tl.load(z + row * width + j, m) + tl.load(b + j, m))
    tl.store(operand + tl.load(slot + row + first) * width + j, h, m)


@triton.jit(**ANY)
def fc_down(d_operand, operand, slot, dz, first, leaves, width: tl.constexpr, BLOCK: tl.constexpr):
    """Row `first` + k: the cotangent of its product, from its half of the cotangent of its parent's operand."""
    row = tl.program_id(0).to(tl.int64) + first
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = j < width
    at = tl.load(slot + row) * width + j
    h = tl.load(operand + at, m)
    tl.store(dz + (row - leaves) * width + j, tl.load(d_operand + at, m) * (1 - h * h), m)
