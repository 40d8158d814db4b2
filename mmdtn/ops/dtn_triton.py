"""Triton kernels for DTN on GPUs, and the functions that launch them.

The names follow docs/mathematics.md. A prenormalised token is z, and ``shift`` is a channel's mean over the cells of
the image. In each cell, u is the mean of z - shift and v is the mean of (z - shift)^2. Then M = P u and V = P v - M^2.
The P of a head is the product of two matrices: P_y acts along the columns of the grid, and P_x along its rows. The
kernels are::

                                      forward                            backward
    unpooled, up to 16 cells a side   axes, statistics, grid             grid_backward, tokens_backward, parameters
    otherwise                         axes, statistics, rows, columns    rows, columns_backward, rows_backward,
                                                                         tokens_backward, parameters

The kernels are compiled for the constants of a :class:`Layer`, and work for every image size. Statistics are float32
for every input dtype. If several programs contribute to one sum, each writes a partial sum, and ``_parameters`` adds
these up. The kernels use no atomics, so their results are reproducible.
"""

from __future__ import annotations  # without Triton, the annotation tl.constexpr does not exist

import functools
import os
from collections import namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .interface import Settings, Tensors
from .triton_launch import Launcher

try:
    import triton
    import triton.language as tl
    from triton import jit
except ImportError:  # Windows and macOS
    triton = None

    def jit(**_: Any) -> Callable[[Callable], Callable]:
        return lambda function: function


INTERPRETED = os.environ.get('TRITON_INTERPRET') == '1'
DEVICE = 'cpu' if INTERPRETED else 'cuda'  # Triton's interpreter runs kernels on CPU tensors
SMALL = 16  # largest side, in cells, of a grid that a single program can process
SIZES = ['H', 'W']

# Layers that together run every branch of every kernel: grid (height, width), channels, heads and pool size.
CHECKS = [((5, 7), 48, 3, 1), ((17, 3), 40, 1, 1), ((5, 7), 24, 2, 2), ((37, 6), 24, 2, 2)]

# Values inside kernels
Pair = namedtuple('Pair', 'u v')  # two maps of cells: u and v, P u and P v, or gradients of these maps
Axis = namedtuple('Axis', 'P moments n stride')  # P_y or P_x of one head: n x n, rows `stride` apart
Chunk = namedtuple('Chunk', 'head channel real shift mean_lambda var_lambda')  # some channels of one head of an image
Normalised = namedtuple(
    'Normalised', 'at mask value inverse mean var'
)  # tokens of a chunk; shift is subtracted from mean


class Layer(NamedTuple):
    """Constants for which the kernels are compiled."""

    C: int
    K: int
    c: int  # channels of a head
    width: int  # c, rounded up to a power of two
    rows: int  # number of cells in a program of _rows or _columns
    tile: int  # number of tokens or cells in a program that computes all channels
    lanes: int  # number of channels in a program that computes part of one head
    blocks: int  # number of such parts in all heads
    parts: int  # blocks, rounded up to a power of two
    record: int  # the 5 floats of _store_record, rounded up to a power of two
    tf32x3: bool  # whether to compute a float32 product as three TF32 products; NVIDIA GPUs from sm_80 on
    s: Settings


class Memory(NamedTuple):
    """Tensors used by the forward and the backward pass. A pair has two maps of cells, each B x h x w x C."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    mean_lambda: Tensor
    var_lambda: Tensor
    position: Tensor
    # saved by the forward pass
    of_tokens: Tensor  # B x H x W x (K + 2): 1 / RMS of each head, mean, variance
    of_channels: Tensor  # B x C: the shift of each channel
    P: Tensor  # K x (h + w) x stride: the rows of P_y and then of P_x, for each head
    moments: Tensor  # K x (h + w) x 3: moments of the rows of P, for the derivatives of P
    cells: Pair  # means and variances of the tokens in a cell; without pooling, x itself
    rows: Pair | None  # P_x u and P_x v, and in the backward pass also their gradients


class Gradients(NamedTuple):
    """Tensors used only by the backward pass."""

    of_y: Tensor
    of_uv: Pair  # gradients of u and v; without pooling, both fields are the gradient of z
    of_tokens: Tensor  # B x H x W x blocks x 2: partial gradients of a token's mean and variance
    moments: Pair | None  # M and V of pooled layers, which _tokens_backward reads
    column: Pair | None  # each program's running sums over one column of more than 16 cells
    # partial gradients
    weight_parts: Tensor  # parts x C
    bias_parts: Tensor  # parts x C
    records: Tensor  # partial gradients of the lambdas and of position, in the layout of _store_record
    # gradients
    of_x: Tensor
    of_weight: Tensor
    of_bias: Tensor
    of_mean_lambda: Tensor
    of_var_lambda: Tensor
    of_position: Tensor


@jit()
def _axis(memory, head, axis, h, w):
    row, stride = head.to(tl.int64) * (h + w) + axis * h, tl.cdiv(tl.maximum(h, w), 16) * 16
    return Axis(memory.P + row * stride, memory.moments + row * 3, h + axis * (w - h), stride)


@jit(do_not_specialize=SIZES)
def _axes(memory, H, W, L, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Computes P_y and P_x, padded with zeros, and their moments."""
    head, axis = tl.program_id(1), tl.program_id(2)
    to = _axis(memory, head, axis, tl.cdiv(H, L.s.pool_size), tl.cdiv(W, L.s.pool_size))
    query = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    key = tl.arange(0, KEYS)[None]
    shift = (key - query).to(tl.float32)
    quadratic, linear = tl.load(memory.position + 3 * head), tl.load(memory.position + 3 * head + 2 - axis)
    if L.s.identity:
        top = tl.zeros([ROWS, 1], tl.float32)
        P = tl.where(key == query, 1.0, 0.0)
    else:
        # Subtracting the largest score of each row keeps scores precise where P is large.
        score = tl.where(key < to.n, shift * (quadratic * shift + linear), float('-inf'))
        top = tl.max(tl.where(score == tl.max(score, 1)[:, None], shift, float('-inf')), 1)[:, None]
        score = (shift - top) * (quadratic * (shift + top) + linear)
        P = tl.exp(tl.where(key < to.n, score, float('-inf')))
        P /= tl.sum(P, 1)[:, None]
    exists = query < to.n
    tl.store(to.P + query * to.stride + key, P, mask=exists & (key < tl.cdiv(to.n, 16) * 16))
    tl.store(to.moments + 3 * query, top, mask=exists)
    tl.store(to.moments + 3 * query + 1, tl.sum(P * (shift - top) * (shift + top), 1)[:, None], mask=exists)
    tl.store(to.moments + 3 * query + 2, tl.sum(P * (shift - top), 1)[:, None], mask=exists)


@jit()
def _load_P(axis, query, key):
    mask = (query < axis.n)[:, None] & (key < tl.cdiv(axis.n, 16) * 16)[None]
    return tl.load(axis.P + query[:, None] * axis.stride + key[None], mask=mask, other=0.0)


@jit()
def _dot(a, b, L):
    return tl.dot(a, b, input_precision='tf32x3' if L.tf32x3 else 'ieee')


@jit()
def _apply(P, pair, L):
    return Pair(_dot(P, pair.u, L), _dot(P, pair.v, L))


@jit()
def _sum(tile, NOW: tl.constexpr):
    """Returns the sum over a tile, or the tile itself if the caller sums later."""
    if NOW:
        return tl.sum(tile)
    else:
        return tile


@jit()
def _of_position(P, axis, query, key, pair, of, NOW: tl.constexpr, L):
    """Returns the gradients of an axis's two coefficients. ``of`` is the gradient of the result.

    Each sum over the tile is a barrier, so a loop sums only once, at its end. Without a loop, summing NOW saves
    registers. The derivative dP/da is P (f - P f), where f is relative to the row's largest score. Computing the
    gradient of P itself, a product over channels, would spill registers.
    """
    at = axis.moments + 3 * query
    top = tl.load(at, mask=query < axis.n, other=0.0)[:, None]
    square = tl.load(at + 1, mask=query < axis.n, other=0.0)[:, None]
    linear = tl.load(at + 2, mask=query < axis.n, other=0.0)[:, None]
    shift = (key[None] - query[:, None]).to(tl.float32)
    by_square, by_linear = P * ((shift - top) * (shift + top) - square), P * (shift - top - linear)
    of_square = _sum(_dot(by_square, pair.u, L) * of.u, NOW)
    of_linear = _sum(_dot(by_linear, pair.u, L) * of.u, NOW)
    of_square += _sum(_dot(by_square, pair.v, L) * of.v, NOW)
    of_linear += _sum(_dot(by_linear, pair.v, L) * of.v, NOW)
    return of_square, of_linear


@jit()
def _load_pair(pair, at, mask):
    return Pair(tl.load(pair.u + at, mask=mask, other=0.0), tl.load(pair.v + at, mask=mask, other=0.0))


@jit()
def _store_pair(pair, at, mask, values):
    tl.store(pair.u + at, values.u, mask=mask)
    tl.store(pair.v + at, values.v, mask=mask)


@jit()
def _from(pair, offset):
    """Returns a pair that starts at an offset. Within a line or an image, 32 bits are enough to address a tile."""
    return Pair(pair.u + offset, pair.v + offset)


@jit()
def _zeros(rows: tl.constexpr, lanes: tl.constexpr):
    return Pair(tl.zeros([rows, lanes], tl.float32), tl.zeros([rows, lanes], tl.float32))


@jit()
def _store_record(to, of_mean_lambda, of_var_lambda, of_square, of_horizontal, of_vertical):
    """Stores partial gradients of a head's lambdas and position."""
    tl.store(to, of_mean_lambda)
    tl.store(to + 1, of_var_lambda)
    tl.store(to + 2, of_square)
    tl.store(to + 3, of_horizontal)
    tl.store(to + 4, of_vertical)


@jit()
def _tile(program, n, size: tl.constexpr):
    """Splits lines (or images) of n items into tiles. Returns the program's line and the items of its tile."""
    return (program // tl.cdiv(n, size)).to(tl.int64), program % tl.cdiv(n, size) * size + tl.arange(0, size)


@jit()
def _chunk(memory, b, lane, L):
    """Returns the program's block of channels. A block never spans two heads."""
    block = tl.program_id(0) % L.blocks
    head, channel = block // (L.blocks // L.K), block % (L.blocks // L.K) * L.lanes + lane
    real = channel < L.c
    channel += head * L.c
    shift = tl.load(memory.of_channels + b * L.C + channel, mask=real, other=0.0)
    return Chunk(head, channel, real, shift, tl.load(memory.mean_lambda + head), tl.load(memory.var_lambda + head))


@jit()
def _token(y, x, offset, H, W, L):
    """Returns the index of token ``offset`` of the cell at row y and column x, and whether this token exists."""
    row = offset // L.s.pool_size
    y, x = y * L.s.pool_size + row, (x - row) * L.s.pool_size + offset
    return y * W + x, (y < H) & (x < W)


@jit()
def _load_head(x_of_image, token, there, head, L):
    """Loads one head of some tokens. Returns z, the factor from x to z, and the mask."""
    channel = tl.arange(0, L.width)[None]
    mask = there[:, None] & (channel < L.c)
    z = tl.load(x_of_image + token[:, None] * L.C + head * L.c + channel, mask=mask, other=0.0).to(tl.float32)
    scale = tl.zeros_like(token).to(tl.float32) + 1.0
    if L.s.prenorm:
        scale = tl.rsqrt(tl.sum(z * z, 1) / L.c + L.s.eps)
        z = tl.where(mask, z * scale[:, None], 0.0)
    return z, scale, mask


@jit(do_not_specialize=SIZES)
def _statistics(memory, shifts, H, W, L):
    """Computes the statistics of each token, the mean and variance of each cell, and partial sums of the shift."""
    S: tl.constexpr = L.s.pool_size
    h, w = tl.cdiv(H, S), tl.cdiv(W, S)
    b, cell = _tile(tl.program_id(0), h * w, L.tile)
    lane = tl.arange(0, L.width)
    part = tl.program_id(0).to(tl.int64) * L.C + lane
    cells, tokens = b * h * w, b * H * W
    x_of_image, of_tokens = memory.x + tokens * L.C, memory.of_tokens + tokens * (L.K + 2)
    for offset in range(S * S):
        token, there = _token(cell // w, cell % w, offset, H, W, L)
        of_token = of_tokens + token * (L.K + 2)
        mean = tl.zeros([L.tile], tl.float32)
        squares = tl.zeros([L.tile], tl.float32)
        for head in range(L.K):  # Chan's formula merges the heads, and is accurate far from zero
            z, scale, mask = _load_head(x_of_image, token, there, head, L)
            head_mean = tl.sum(z, 1) / L.c
            deviation = tl.where(mask, z - head_mean[:, None], 0.0)
            change = head_mean - mean
            mean += change / (head + 1)
            squares += tl.sum(deviation * deviation, 1) + change * change * (L.c * head / (head + 1))
            tl.store(of_token + head, scale, mask=there)
            if S == 1:
                tl.store(shifts + part + head * L.c, tl.sum(z, 0) / (h * w), mask=lane < L.c)
        tl.store(of_token + L.K, mean, mask=there)
        tl.store(of_token + L.K + 1, squares / (L.C - L.s.unbiased), mask=there)
    if S > 1:
        for head in range(L.K):
            first, second = _zeros(L.tile, L.width)
            number = tl.zeros([L.tile, 1], tl.float32)
            for offset in range(S * S):  # Welford's formula adds one token at a time
                token, there = _token(cell // w, cell % w, offset, H, W, L)
                z, _, mask = _load_head(x_of_image, token, there, head, L)
                number += tl.where(there, 1.0, 0.0)[:, None]
                change = tl.where(mask, z - first, 0.0)
                first += change / tl.maximum(number, 1.0)
                second += change * tl.where(mask, z - first, 0.0)
            at = cell[:, None] * L.C + head * L.c + lane[None]
            mask = (cell < h * w)[:, None] & (lane < L.c)[None]
            tl.store(memory.cells.u + cells * L.C + at, first, mask=mask)
            if L.s.pool_second_moment:
                tl.store(memory.cells.v + cells * L.C + at, second / tl.maximum(number, 1.0), mask=mask)
            tl.store(shifts + part + head * L.c, tl.sum(first, 0) / (h * w), mask=lane < L.c)


@jit()
def _load_cells(cells, of_tokens, cell, there, chunk, L):
    """Loads u and v of some cells."""
    mask = there & chunk.real
    z = tl.load(cells.u + cell * L.C + chunk.channel, mask=mask, other=0.0).to(tl.float32)
    if L.s.pool_size == 1:
        z *= tl.load(of_tokens + cell * (L.K + 2) + chunk.head, mask=there, other=0.0)
    u = tl.where(mask, z - chunk.shift, 0.0)
    v = u * u
    if L.s.pool_size > 1 and L.s.pool_second_moment:
        v += tl.load(cells.v + cell * L.C + chunk.channel, mask=mask, other=0.0)
    return Pair(u, v)


@jit()
def _normalise(x, of_tokens, token, there, M, V, chunk, L):
    mask = there & chunk.real
    at, of_token = token * L.C + chunk.channel, of_tokens + token * (L.K + 2)
    # The mask has no dimension for lanes, so that only one lane loads each number.
    mean = tl.load(of_token + L.K, mask=there, other=0.0) - chunk.shift
    var = tl.load(of_token + L.K + 1, mask=there, other=1.0)
    variance = chunk.var_lambda * var + (1 - chunk.var_lambda) * tl.maximum(V, 0.0)
    inverse = tl.rsqrt(variance + L.s.eps)
    z = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    u = z * tl.load(of_token + chunk.head, mask=there, other=0.0) - chunk.shift
    value = (u - chunk.mean_lambda * mean - (1 - chunk.mean_lambda) * M) * inverse
    return Normalised(at, mask, value, inverse, mean, var)


@jit()
def _store_output(memory, y, n, chunk):
    weight = tl.load(memory.weight + chunk.channel, mask=chunk.real)
    bias = tl.load(memory.bias + chunk.channel, mask=chunk.real)
    tl.store(y + n.at, n.value * weight + bias, mask=n.mask)


@jit()
def _differentiate(grad, weight, n):
    """Returns the gradients of the output, -mu and the variance."""
    of_y = tl.load(grad + n.at, mask=n.mask, other=0.0).to(tl.float32)
    d = tl.where(n.mask, of_y * weight * n.inverse, 0.0)
    return of_y, d, tl.where(n.mask, -0.5 * d * n.value * n.inverse, 0.0)


@jit(do_not_specialize=SIZES)
def _rows(memory, H, W, L):
    """Computes P_x u and P_x v for some cells of a row."""
    h, w = tl.cdiv(H, L.s.pool_size), tl.cdiv(W, L.s.pool_size)
    row, query = _tile(tl.program_id(0) // L.blocks, w, L.rows)
    chunk = _chunk(memory, row // h, tl.arange(0, L.lanes)[None], L)
    P_x = _axis(memory, chunk.head, 1, h, w)
    cells, of_tokens = _from(memory.cells, row * w * L.C), memory.of_tokens + row * w * (L.K + 2)
    U, V = _zeros(L.rows, L.lanes)
    for start in range(0, w, 16):
        key = start + tl.arange(0, 16)
        uv = _load_cells(cells, of_tokens, key[:, None], (key < w)[:, None], chunk, L)
        part = _apply(_load_P(P_x, query, key), uv, L)
        U += part.u
        V += part.v
    at = query[:, None] * L.C + chunk.channel
    _store_pair(_from(memory.rows, row * w * L.C), at, (query < w)[:, None] & chunk.real, Pair(U, V))


@jit()
def _moments(rows, P_y, x, w, query, chunk, L):
    """Returns M and V of some cells of column x. ``rows`` is the output of kernel ``_rows`` for the image."""
    M, V = _zeros(query.shape[0], L.lanes)
    for start in tl.range(0, P_y.n, 16, num_stages=2):
        key = start + tl.arange(0, 16)
        at = (x + key[:, None] * w) * L.C + chunk.channel
        part = _apply(_load_P(P_y, query, key), _load_pair(rows, at, (key < P_y.n)[:, None] & chunk.real), L)
        M += part.u
        V += part.v
    return M, V - M * M


@jit(do_not_specialize=SIZES)
def _columns(memory, y, H, W, L):
    """Applies P_y to the output of ``_rows`` for some cells of a column, and normalises the tokens of these cells."""
    h, w = tl.cdiv(H, L.s.pool_size), tl.cdiv(W, L.s.pool_size)
    column, query = _tile(tl.program_id(0) // L.blocks, h, L.rows)
    b, x = column // w, (column % w).to(tl.int32)
    chunk = _chunk(memory, b, tl.arange(0, L.lanes)[None], L)
    rows, P_y = _from(memory.rows, b * h * w * L.C), _axis(memory, chunk.head, 0, h, w)
    M, V = _moments(rows, P_y, x, w, query, chunk, L)
    tokens = b * H * W
    x_of_image, of_tokens = memory.x + tokens * L.C, memory.of_tokens + tokens * (L.K + 2)
    for offset in range(L.s.pool_size * L.s.pool_size):
        token, there = _token(query[:, None], x, offset, H, W, L)
        n = _normalise(x_of_image, of_tokens, token, there, M, V, chunk, L)
        _store_output(memory, y + tokens * L.C, n, chunk)


@jit(do_not_specialize=SIZES)
def _columns_backward(memory, g, H, W, L):
    """Applies P_y^T to the gradients of M and V, and computes partial gradients of the parameters.

    The result replaces the output of ``_rows``. Pooled layers also store M and V for ``_tokens_backward``. Layers
    without pooling store the gradient of -mu, which is a summand of the gradient of z. A program processes its columns
    one after another. If a column has more than 16 cells, its sums are kept in global memory.
    """
    S: tl.constexpr = L.s.pool_size  # Triton 3.5 would compile dead branches if they tested L.s.pool_size
    h, w = tl.cdiv(H, S), tl.cdiv(W, S)
    block, b = tl.program_id(0) % L.blocks, (tl.program_id(0) // L.blocks).to(tl.int64)
    lane = tl.arange(0, L.lanes)[None]
    chunk = _chunk(memory, b, lane, L)
    P_y = _axis(memory, chunk.head, 0, h, w)
    weight = tl.load(memory.weight + chunk.channel, mask=chunk.real, other=0.0)
    cells, tokens = b * h * w, b * H * W
    rows = _from(memory.rows, cells * L.C)
    x_of_image, of_tokens = memory.x + tokens * L.C, memory.of_tokens + tokens * (L.K + 2)
    program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    column = _from(g.column, program * h * L.lanes)
    # The tile is summed only once, after the loops, because each sum inside them would be a barrier.
    of_weight, of_bias = _zeros(16, L.lanes)
    of_mean_lambda, of_var_lambda = _zeros(16, L.lanes)
    of_square, of_linear = _zeros(16, L.lanes)
    for x in range(tl.program_id(1), w, tl.num_programs(1)):
        for begin in range(0, h, 16):
            query = begin + tl.arange(0, 16)
            M, V = _moments(rows, P_y, x, w, query, chunk, L)
            dM, dV = _zeros(16, L.lanes)
            for offset in range(S * S):
                token, there = _token(query[:, None], x, offset, H, W, L)
                n = _normalise(x_of_image, of_tokens, token, there, M, V, chunk, L)
                of_y, d, e = _differentiate(g.of_y + tokens * L.C, weight, n)
                of_weight += tl.where(n.mask, of_y * n.value, 0.0)
                of_bias += of_y
                of_mean_lambda += d * (M - n.mean)
                of_var_lambda += e * (n.var - tl.maximum(V, 0.0))
                dM -= (1 - chunk.mean_lambda) * d
                dV += (1 - chunk.var_lambda) * e
                of_token = g.of_tokens + tokens * L.blocks * 2 + (token * L.blocks + block) * 2
                tl.store(of_token, chunk.mean_lambda * tl.sum(d, 1)[:, None], mask=there)
                tl.store(of_token + 1, chunk.var_lambda * tl.sum(e, 1)[:, None], mask=there)
                if S == 1:
                    tl.store(g.of_uv.u + tokens * L.C + n.at, d, mask=n.mask)
            if S > 1:
                at = (x + query[:, None] * w) * L.C + chunk.channel
                _store_pair(_from(g.moments, cells * L.C), at, (query < h)[:, None] & chunk.real, Pair(M, V))
            of_moments = Pair(dM - 2 * M * dV, dV)
            for start in range(0, h, 16):
                key = start + tl.arange(0, 16)
                mask = (key < h)[:, None] & chunk.real
                at = (x + key[:, None] * w) * L.C + chunk.channel
                P = _load_P(P_y, query, key)
                uv = _load_pair(rows, at, mask)
                square, linear = _of_position(P, P_y, query, key, uv, of_moments, False, L)
                of_square += square
                of_linear += linear
                tl.debug_barrier()  # all threads read their rows before any are overwritten
                # P is loaded again, because keeping it until here would spill registers.
                of_rows = _apply(tl.trans(_load_P(P_y, query, key)), of_moments, L)
                own = key[:, None] * L.lanes + lane
                before = _load_pair(column, own, mask & (begin > 0))
                of_rows = Pair(of_rows.u + before.u, of_rows.v + before.v)
                _store_pair(column, own, mask & (begin + 16 < h), of_rows)
                _store_pair(rows, at, mask & (begin + 16 >= h), of_rows)
    part = b * tl.num_programs(1) + tl.program_id(1)
    at = part * L.C + chunk.channel
    tl.store(g.weight_parts + at, tl.sum(of_weight, 0)[None], mask=chunk.real)
    tl.store(g.bias_parts + at, tl.sum(of_bias, 0)[None], mask=chunk.real)
    record = g.records + (part * L.blocks + block) * L.record
    of_mean_lambda, of_var_lambda = tl.sum(of_mean_lambda), tl.sum(of_var_lambda)
    _store_record(record, of_mean_lambda, of_var_lambda, tl.sum(of_square), 0.0, tl.sum(of_linear))


@jit(do_not_specialize=SIZES)
def _rows_backward(memory, g, records, H, W, L):
    """Applies P_x^T to the output of ``_columns_backward``.

    The kernel yields the gradients of u and v or, without pooling, the gradient of z.
    """
    h, w = tl.cdiv(H, L.s.pool_size), tl.cdiv(W, L.s.pool_size)
    row, key = _tile(tl.program_id(0) // L.blocks, w, 16)
    chunk = _chunk(memory, row // h, tl.arange(0, L.lanes)[None], L)
    P_x = _axis(memory, chunk.head, 1, h, w)
    cells, of_tokens = _from(memory.cells, row * w * L.C), memory.of_tokens + row * w * (L.K + 2)
    rows, of_uv = _from(memory.rows, row * w * L.C), _from(g.of_uv, row * w * L.C)
    uv = _load_cells(cells, of_tokens, key[:, None], (key < w)[:, None], chunk, L)
    of_u, of_v = _zeros(16, L.lanes)
    of_square, of_linear = _zeros(32, L.lanes)
    for start in range(0, w, 32):
        query = start + tl.arange(0, 32)
        at = query[:, None] * L.C + chunk.channel
        of_rows = _load_pair(rows, at, (query < w)[:, None] & chunk.real)
        P = _load_P(P_x, query, key)
        square, linear = _of_position(P, P_x, query, key, uv, of_rows, False, L)
        of_square += square
        of_linear += linear
        part = _apply(tl.trans(P), of_rows, L)
        of_u += part.u
        of_v += part.v
    record = records + tl.program_id(0).to(tl.int64) * L.record
    _store_record(record, 0.0, 0.0, tl.sum(of_square), tl.sum(of_linear), 0.0)
    at, mask = key[:, None] * L.C + chunk.channel, (key < w)[:, None] & chunk.real
    if L.s.pool_size == 1 or not L.s.pool_second_moment:
        of_u += 2 * uv.u * of_v
    if L.s.pool_size == 1:
        of_u += tl.load(of_uv.u + at, mask=mask, other=0.0)
    tl.store(of_uv.u + at, of_u, mask=mask)
    if L.s.pool_size > 1 and L.s.pool_second_moment:
        tl.store(of_uv.v + at, of_v, mask=mask)


@jit()
def _swap(tile, L):
    """Swaps the grid axes of a tile. Rows stand for one axis, and columns for pairs of the other axis and a lane."""
    return tl.permute(tile.reshape(16, 16, L.lanes), (1, 0, 2)).reshape(16, 16 * L.lanes)


@jit()
def _swap_pair(pair, L):
    return Pair(_swap(pair.u, L), _swap(pair.v, L))


@jit()
def _grid_rows(x, of_tokens, P_x, chunk, H, W, L):
    """Returns u and v of an image, P_x, and the products P_x u and P_x v. The rows of all tiles are indexed by x."""
    side, y = tl.arange(0, 16), tl.arange(0, 16 * L.lanes)[None] // L.lanes
    there = (y < H) & (side < W)[:, None] & chunk.real
    uv = _load_cells(Pair(x, x), of_tokens, y * W + side[:, None], there, chunk, L)
    P = _load_P(P_x, side, side)
    return uv, P, _apply(P, uv, L)


@jit()
def _grid_tokens(x, of_tokens, P_y, P_x, chunk, H, W, L):
    """Returns M, V and the normalised tokens of an image. The rows of all tiles are indexed by y."""
    side, at_x = tl.arange(0, 16), tl.arange(0, 16 * L.lanes)[None] // L.lanes
    _, _, rows = _grid_rows(x, of_tokens, P_x, chunk, H, W, L)
    M, V = _apply(_load_P(P_y, side, side), _swap_pair(rows, L), L)
    V -= M * M
    y = side[:, None]
    there = (y < H) & (at_x < W) & chunk.real
    return M, V, _normalise(x, of_tokens, y * W + at_x, there, M, V, chunk, L)


@jit(do_not_specialize=SIZES)
def _grid(memory, y, H, W, L):
    """Normalises some channels of one head for an image with at most 16 x 16 tokens."""
    b = (tl.program_id(0) // L.blocks).to(tl.int64)
    chunk = _chunk(memory, b, tl.arange(0, 16 * L.lanes)[None] % L.lanes, L)  # repeated for each of 16 cells in a row
    P_y, P_x = _axis(memory, chunk.head, 0, H, W), _axis(memory, chunk.head, 1, H, W)
    x, of_tokens = memory.x + b * H * W * L.C, memory.of_tokens + b * H * W * (L.K + 2)
    _, _, n = _grid_tokens(x, of_tokens, P_y, P_x, chunk, H, W, L)
    _store_output(memory, y + b * H * W * L.C, n, chunk)


@jit(do_not_specialize=SIZES)
def _grid_backward(memory, g, H, W, L):
    """Computes the gradient of z through P, and partial gradients of the tokens' statistics and of the parameters."""
    block, b = tl.program_id(0) % L.blocks, (tl.program_id(0) // L.blocks).to(tl.int64)
    side, along = tl.arange(0, 16), tl.arange(0, 16 * L.lanes)[None] // L.lanes
    y = side[:, None]
    chunk = _chunk(memory, b, tl.arange(0, 16 * L.lanes)[None] % L.lanes, L)
    P_y, P_x = _axis(memory, chunk.head, 0, H, W), _axis(memory, chunk.head, 1, H, W)
    x, of_tokens = memory.x + b * H * W * L.C, memory.of_tokens + b * H * W * (L.K + 2)
    M, V, n = _grid_tokens(x, of_tokens, P_y, P_x, chunk, H, W, L)
    weight = tl.load(memory.weight + chunk.channel, mask=chunk.real, other=0.0)
    of_y, d, e = _differentiate(g.of_y + b * H * W * L.C, weight, n)
    record = g.records + tl.program_id(0).to(tl.int64) * L.record  # in the layout of _store_record
    tl.store(record, tl.sum(d * (M - n.mean)))
    tl.store(record + 1, tl.sum(e * (n.var - tl.maximum(V, 0.0))))
    own = _chunk(memory, b, tl.arange(0, L.lanes), L)
    of_weight = tl.sum(tl.where(n.mask, of_y * n.value, 0.0), 0)
    tl.store(g.weight_parts + b * L.C + own.channel, tl.sum(of_weight.reshape(16, L.lanes), 0), mask=own.real)
    tl.store(g.bias_parts + b * L.C + own.channel, tl.sum(tl.sum(of_y, 0).reshape(16, L.lanes), 0), mask=own.real)
    of_token = g.of_tokens + b * H * W * L.blocks * 2 + ((y * W + side[None]) * L.blocks + block) * 2
    there = (y < H) & (side < W)[None]
    tl.store(of_token, chunk.mean_lambda * tl.sum(d.reshape(16, 16, L.lanes), 2), mask=there)
    tl.store(of_token + 1, chunk.var_lambda * tl.sum(e.reshape(16, 16, L.lanes), 2), mask=there)
    dV = (1 - chunk.var_lambda) * e
    of_moments = Pair(-(1 - chunk.mean_lambda) * d - 2 * M * dV, dV)
    # Here and below, rows and P are loaded again, because keeping them would spill registers. The stores in between
    # force the compiler to load them again.
    _, _, rows = _grid_rows(x, of_tokens, P_x, chunk, H, W, L)
    P = _load_P(P_y, side, side)
    of_square, of_vertical = _of_position(P, P_y, side, side, _swap_pair(rows, L), of_moments, True, L)
    tl.store(record + 4, of_vertical)
    of_rows = _swap_pair(_apply(tl.trans(P), of_moments, L), L)
    uv, P, _ = _grid_rows(x, of_tokens, P_x, chunk, H, W, L)
    square, of_horizontal = _of_position(P, P_x, side, side, uv, of_rows, True, L)
    tl.store(record + 2, of_square + square)
    tl.store(record + 3, of_horizontal)
    of_u, of_v = _apply(tl.trans(P), of_rows, L)
    at = (along * W + y) * L.C + chunk.channel  # the rows of this tile are indexed by x
    tl.store(
        g.of_uv.u + b * H * W * L.C + at, _swap(d, L) + of_u + 2 * uv.u * of_v, mask=(along < H) & (y < W) & chunk.real
    )


@jit(do_not_specialize=SIZES)
def _tokens_backward(memory, g, H, W, L):
    """Computes the gradient of x through the token's cell, its own statistics and its root mean squares."""
    S: tl.constexpr = L.s.pool_size
    h, w = tl.cdiv(H, S), tl.cdiv(W, S)
    b, token = _tile(tl.program_id(0), H * W, L.tile)
    there = (token < H * W)[:, None]
    y, x = token // W, token % W
    number = tl.minimum(H - y // S * S, S) * tl.minimum(W - x // S * S, S)
    share = 1 / number.to(tl.float32)[:, None]
    cell, token = (y // S * w + x // S)[:, None], token[:, None]
    cells, tokens = b * h * w, b * H * W
    x_of_image, of_tokens = memory.x + tokens * L.C, memory.of_tokens + tokens * (L.K + 2)
    of_uv = _from(g.of_uv, cells * L.C)
    part = tl.arange(0, L.parts)[None]
    parts = g.of_tokens + tokens * L.blocks * 2 + (token * L.blocks + part) * 2
    counted = there & (part < L.blocks)
    of_mean = tl.sum(tl.load(parts, mask=counted, other=0.0), 1)[:, None] / L.C
    of_var = tl.sum(tl.load(parts + 1, mask=counted, other=0.0), 1)[:, None] * (2 / (L.C - L.s.unbiased))
    mean = tl.load(of_tokens + token * (L.K + 2) + L.K, mask=there, other=0.0)
    real = (tl.arange(0, L.width) < L.c)[None]
    mask = there & real
    for head in range(L.K):
        channel = head * L.c + tl.arange(0, L.width)[None]
        at, at_cell = token * L.C + channel, cell * L.C + channel
        scale = tl.load(of_tokens + token * (L.K + 2) + head, mask=there, other=0.0)
        z = tl.load(x_of_image + at, mask=mask, other=0.0).to(tl.float32) * scale
        if S == 1:
            of_z = tl.load(of_uv.u + at, mask=mask, other=0.0)
        else:
            shift = tl.load(memory.of_channels + b * L.C + channel, mask=real, other=0.0)
            mean_lambda, var_lambda = tl.load(memory.mean_lambda + head), tl.load(memory.var_lambda + head)
            chunk = Chunk(head, channel, real, shift, mean_lambda, var_lambda)
            M, V = _load_pair(_from(g.moments, cells * L.C), at_cell, mask)
            n = _normalise(x_of_image, of_tokens, token, there, M, V, chunk, L)
            weight = tl.load(memory.weight + channel, mask=real, other=0.0)
            _, of_z, _ = _differentiate(g.of_y + tokens * L.C, weight, n)
            of_z += tl.load(of_uv.u + at_cell, mask=mask, other=0.0) * share
            if L.s.pool_second_moment:
                of_z += 2 * (z - shift) * tl.load(of_uv.v + at_cell, mask=mask, other=0.0) * share
        of_z += of_var * (z - mean) - of_mean
        if L.s.prenorm:
            of_z = tl.where(mask, of_z, 0.0)
            of_z = scale * (of_z - z * (tl.sum(of_z * z, 1) / L.c)[:, None])
        tl.store(g.of_x + tokens * L.C + at, of_z, mask=mask)


@jit(do_not_specialize=['num_parts', 'num_records'])
def _parameters(g, num_parts, num_records, L):
    """Adds up the partial gradients of the parameters. There is one program for each head."""
    head = tl.program_id(0)
    lane, channel = tl.arange(0, L.record)[None], tl.arange(0, L.width)
    real = channel < L.c
    channel += head * L.c
    of_weight, of_bias = _zeros(L.tile, L.width)
    for begin in range(0, num_parts, L.tile):
        part = begin + tl.arange(0, L.tile)[:, None]
        at, mask = part * L.C + channel[None], (part < num_parts) & real[None]
        of_weight += tl.load(g.weight_parts + at, mask=mask, other=0.0)
        of_bias += tl.load(g.bias_parts + at, mask=mask, other=0.0)
    tl.store(g.of_weight + channel, tl.sum(of_weight, 0), mask=real)
    tl.store(g.of_bias + channel, tl.sum(of_bias, 0), mask=real)
    of_head = L.blocks // L.K
    total = tl.zeros([256, L.record], tl.float32)
    for begin in range(0, num_records * of_head, 256):
        record = begin + tl.arange(0, 256)[:, None]
        at = record // of_head * L.blocks + head * of_head + record % of_head
        total += tl.load(g.records + at.to(tl.int64) * L.record + lane, mask=record < num_records * of_head, other=0.0)
    total = tl.sum(total, 0)
    lane = tl.arange(0, L.record)
    tl.store(g.of_mean_lambda + head + lane, total, mask=lane == 0)
    tl.store(g.of_var_lambda + head + lane - 1, total, mask=lane == 1)
    tl.store(g.of_position + 3 * head + lane - 2, total, mask=(lane >= 2) & (lane < 5))


class _Plan(NamedTuple):
    """Data that all calls of layers with the same constants share."""

    L: Layer
    wide: Layer  # for _columns_backward, which would spill registers with 16 lanes
    constants: tuple[Any, Any]  # L and wide as Triton constants
    launch: Launcher
    small: bool


@functools.cache
def _plan(C: int, K: int, s: Settings, fits: bool, device: Any, dtypes: tuple[torch.dtype, ...]) -> _Plan:
    """Returns the plan of a layer. ``fits`` tells whether the grid has at most 16 cells per side.

    Kernels are compiled for one device and its dtypes, so ``device`` and ``dtypes`` belong to the cache key.
    """
    target = None if INTERPRETED else triton.runtime.driver.active.get_current_target()
    tf32x3 = target is not None and target.backend == 'cuda' and target.arch >= 80
    # Programs that process a whole grid need more shared memory than NVIDIA GPUs before sm_80 have.
    small = s.pool_size == 1 and fits and (tf32x3 or target is None or target.backend != 'cuda')
    width = triton.next_power_of_2(C // K)
    tile, lanes = max(1, min(64, 2048 // width)), 16 if small else min(max(width, 16), 64)
    blocks = K * triton.cdiv(C // K, lanes)
    parts = triton.next_power_of_2(blocks)
    L = Layer(C, K, C // K, width, 16 if fits else 32, tile, lanes, blocks, parts, 8, tf32x3, s)
    wide = L._replace(lanes=max(lanes, 32))
    return _Plan(L, wide, (_constants(L), _constants(wide)), Launcher(), small)


def _constants(values: Any) -> Any:
    """Converts the values of a nested tuple to Triton constants."""
    return type(values)(*(_constants(value) if isinstance(value, tuple) else tl.constexpr(value) for value in values))


class _Call:
    """Holds the sizes of one call, and launches its kernels."""

    def __init__(self, t: Tensors, s: Settings, other_dtype: torch.dtype) -> None:
        self.x, self.s, (self.B, self.H, self.W, C) = t.x, s, t.x.shape
        self.h, self.w = -(-self.H // s.pool_size), -(-self.W // s.pool_size)
        fits = max(self.h, self.w) <= SMALL
        device = None if INTERPRETED else triton.runtime.driver.active.get_current_device()
        self.plan = _plan(C, len(t.position), s, fits, device, (t.x.dtype, other_dtype))
        self.L, self.small = self.plan.L, self.plan.small

    def empty(self, *shape: int) -> Tensor:
        return self.x.new_empty(shape, dtype=torch.float32)

    def maps(self, number: int = 2) -> Pair:
        """Returns two empty maps of cells. If ``number`` is 1, both are the same tensor."""
        first = self.empty(self.B, self.h, self.w, self.L.C)
        return Pair(first, torch.empty_like(first) if number == 2 else first)

    def memory(self, t: Tensors, kept: Tensor) -> Memory:
        L, s = self.L, self.s
        of_tokens, of_channels, P, moments, *cells = kept.split(_sections(self.x.shape, L.K, s))
        pair = Pair(cells[0], cells[-1]) if cells else Pair(t.x, t.x)
        return Memory(*t, of_tokens, of_channels, P, moments, pair, None if self.small else self.maps())

    def launch(
        self, kernel: Any, grid: tuple[int, int, int], *memory: Any, num_warps: int = 4, **constants: int
    ) -> None:
        arguments = (*memory, self.H, self.W, self.plan.constants[0], *constants.values())
        self.plan.launch(kernel, grid, arguments, num_warps, tuple(constants.values()))

    def by_tiles(self, kernel: Any, items: int, *memory: Any) -> None:
        """Launches one program for each tile. ``items`` is the number of tokens or cells in an image."""
        programs = self.B * -(-items // self.L.tile)
        self.launch(kernel, (programs, 1, 1), *memory, num_warps=4 if self.L.width <= 1024 else 8)

    def by_blocks(self, kernel: Any, programs: int, *memory: Any) -> None:
        """Launches ``programs`` programs per block of channels. With these numbers of warps, no registers spill."""
        warps = 8 if self.small else self.L.lanes // 8
        self.launch(kernel, (programs * self.L.blocks, 1, 1), *memory, num_warps=warps)

    def columns_backward(self, columns: int, memory: Memory, g: Gradients) -> None:
        wide, constants = self.plan.wide, self.plan.constants[1]
        grid, arguments = (self.B * wide.blocks, columns, 1), (memory, g, self.H, self.W, constants)
        self.plan.launch(_columns_backward, grid, arguments, wide.lanes // 8)


def _sections(shape: Any, heads: int, s: Settings) -> list[int]:
    """Returns the sizes in floats of the fields that :class:`Memory` saves, from ``of_tokens`` to ``cells``."""
    B, H, W, C = shape
    h, w = -(-H // s.pool_size), -(-W // s.pool_size)
    stride = -(-torch.sym_max(h, w) // 16) * 16
    maps = 0 if s.pool_size == 1 else 1 + s.pool_second_moment
    sizes = [B * H * W * (heads + 2), B * C, heads * (h + w) * stride, heads * (h + w) * 3, *[B * h * w * C] * maps]
    return [-(-size // 4) * 4 for size in sizes]  # every section begins at a multiple of 16 bytes


def kept_size(shape: Any, heads: int, s: Settings) -> int:
    """Returns the number of floats that ``forward`` saves for ``backward``."""
    return sum(_sections(shape, heads, s))


def forward(t: Tensors, s: Settings, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the output and the tensor saved for ``backward``."""
    t = _aligned(t)
    with torch.cuda.device_of(t.x):
        call = _Call(t, s, dtype)
        B, h, w, L = call.B, call.h, call.w, call.L
        y, kept = torch.empty_like(t.x, dtype=dtype), call.empty(kept_size(t.x.shape, L.K, s))
        memory = call.memory(t, kept)
        shifts = call.empty(B, -(-h * w // L.tile), L.C)
        longest = max(h, w)
        keys = triton.next_power_of_2(-(-longest // 16) * 16)
        rows = max(1, min(16, 2048 // keys))
        call.launch(_axes, (-(-longest // rows), L.K, 2), memory, ROWS=rows, KEYS=keys)
        call.by_tiles(_statistics, h * w, memory, shifts)
        torch.sum(shifts, 1, out=memory.of_channels[: B * L.C].view(B, L.C))
        if call.small:
            call.by_blocks(_grid, B, memory, y)
        else:
            call.by_blocks(_rows, B * h * -(-w // L.rows), memory)
            call.by_blocks(_columns, B * w * -(-h // L.rows), memory, y)
    return y, kept


def backward(grad: Tensor, t: Tensors, kept: Tensor, s: Settings) -> Tensors:
    """Returns the gradients of x and the parameters. ``kept`` is the tensor that ``forward`` saved."""
    t, grad = _aligned(t), _aligned((grad,))[0]
    with torch.cuda.device_of(t.x):
        call = _Call(t, s, grad.dtype)
        B, h, w, L, pooled = call.B, call.h, call.w, call.L, s.pool_size > 1
        # Each column has its own program. Longer columns need global memory, so they share fewer programs.
        columns = 1 if call.small else w if h <= 16 else min(-(-w // 4), -(-512 // (B * L.blocks)))
        parts, rows = B * columns, 0 if call.small else B * h * -(-w // 16)
        memory = call.memory(t, kept)
        records = call.empty(parts + rows, L.blocks, L.record)
        column = (
            Pair(*(call.empty(parts, L.blocks, h, call.plan.wide.lanes) for _ in range(2))) if h > 16 else memory.rows
        )
        gradients = Tensors(*(torch.empty_like(tensor) for tensor in t))
        g = Gradients(
            grad,
            call.maps(1 + (pooled and s.pool_second_moment)),
            call.empty(B * call.H * call.W, L.blocks, 2),
            call.maps() if pooled else None,
            column,
            call.empty(parts, L.C),
            call.empty(parts, L.C),
            records,
            *gradients,
        )
        if call.small:
            call.by_blocks(_grid_backward, B, memory, g)
        else:
            call.by_blocks(_rows, B * h * -(-w // L.rows), memory)
            call.columns_backward(columns, memory, g)
            call.by_blocks(_rows_backward, rows, memory, g, records[parts:])
        call.by_tiles(_tokens_backward, call.H * call.W, memory, g)
        call.plan.launch(_parameters, (L.K, 1, 1), (g, parts, parts + rows, call.plan.constants[0]), 4)
    return gradients


def compiled_kernels(t: Tensors, s: Settings, dtype: torch.dtype) -> dict[str, Any]:
    """Returns all kernels that a layer has launched so far, by name."""
    return {name: kernel for (name, *_), kernel in _Call(t, s, dtype).plan.launch.compiled.items()}


def _aligned(tensors: Any) -> Any:
    """Copies tensors that are not aligned to 16 bytes, because the kernels are compiled for aligned tensors."""
    if all(tensor.data_ptr() % 16 == 0 for tensor in tensors):
        return tensors
    aligned = (tensor if tensor.data_ptr() % 16 == 0 else tensor.clone() for tensor in tensors)
    return Tensors(*aligned) if isinstance(tensors, Tensors) else tuple(aligned)
