"""DTN on GPUs: Triton kernels for the passes over tokens and for P, forward and backward.

Letters as in docs/mathematics.md: z is a prenormalised token, ``shift`` its channel's mean over the cells of the image,
u a cell's mean of z - shift, v the mean of its square, M = P u, V = P v - M^2. P is a product of two matrices a head,
P_y along the columns of the grid and P_x along its rows::

                                      forward                            backward
    unpooled, up to 16 cells a side   axes, statistics, grid             axes, grid_backward, tokens_backward
    otherwise                         axes, statistics, rows, columns    axes, statistics (pooled), rows,
                                                                         columns_backward, rows_backward,
                                                                         tokens_backward

Statistics are float32, whatever the input is. What several programs add to is written by each and added by one torch
sum: without atomics, results do not change from run to run. Programs beside each other read channels beside each other.
"""

from __future__ import annotations  # where there is no Triton, there is no tl.constexpr either

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from mmengine.dist import all_reduce, is_distributed
from torch import Tensor

from . import reference
from .reference import Settings

try:
    import triton
    import triton.language as tl
    from triton import jit
except ImportError:  # Windows and macOS
    triton = None

    def jit(**_: Any) -> Callable[[Callable], Callable]:
        return lambda function: function


DEVICE = 'cuda'
NAMES = [f'gradient of {name}' for name in ('x', 'weight', 'bias', 'mean_lambda', 'var_lambda', 'position')]
SMALL = 16  # cells a side of the grids that one program takes whole
# Kernels are not compiled again for images of another size.
SIZES = ['H', 'W', 'h', 'w', 'tiles', 'tokens', 'tasks', 'programs']


@jit(do_not_specialize=SIZES)
def _axes(
    position, kernels, moments, h, w, stride_y, stride_x, K: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    IDENTITY: tl.constexpr,
):  # fmt: skip
    """P_y, K x h x stride_y, and behind it P_x, K x w x stride_x, both padded with zeros; ``moments`` for _slopes."""
    k, axis = tl.program_id(1), tl.program_id(2)
    n = tl.where(axis == 0, h, w)
    stride = tl.where(axis == 0, stride_y, stride_x)
    query = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    key = tl.arange(0, KEYS)[None]
    shift = (key - query).to(tl.float32)
    quadratic, linear = tl.load(position + 3 * k), tl.load(position + 3 * k + 2 - axis)
    if IDENTITY:
        top = tl.zeros([ROWS, 1], tl.float32)
        P = tl.where(key == query, 1.0, 0.0)
    else:
        # Relative to the shift where a row is largest, nothing is lost where P is: neither in P nor in its slopes.
        score = tl.where(key < n, shift * (quadratic * shift + linear), float('-inf'))
        top = tl.max(tl.where(score == tl.max(score, 1)[:, None], shift, float('-inf')), 1)[:, None]
        score = (shift - top) * (quadratic * (shift + top) + linear)
        P = tl.exp(tl.where(key < n, score, float('-inf')))
        P /= tl.sum(P, 1)[:, None]
    row = tl.where(axis == 0, 0, K * h * stride_y) + (k * n + query) * stride
    tl.store(kernels + row + key, P, mask=(query < n) & (key < stride))
    at = moments + (tl.where(axis == 0, 0, K * h) + k * n + query) * 3
    tl.store(at, top, mask=query < n)
    tl.store(at + 1, tl.sum(P * (shift - top) * (shift + top), 1)[:, None], mask=query < n)
    tl.store(at + 2, tl.sum(P * (shift - top), 1)[:, None], mask=query < n)


@jit()
def _load_kernel(kernel, k, query, key, n, stride):
    at = (k * n + query[:, None]) * stride + key[None]
    return tl.load(kernel + at, mask=(query < n)[:, None] & (key < stride)[None], other=0.0)


@jit()
def _slopes(P, moments, k, query, key, n):
    """How P changes with a_1, and with the axis' own coefficient: dP/da = P (f - P f), f relative to the row's top."""
    at = moments + (k * n + query) * 3
    top = tl.load(at, mask=query < n, other=0.0)[:, None]
    square = tl.load(at + 1, mask=query < n, other=0.0)[:, None]
    linear = tl.load(at + 2, mask=query < n, other=0.0)[:, None]
    shift = (key[None] - query[:, None]).to(tl.float32)
    return P * ((shift - top) * (shift + top) - square), P * (shift - top - linear)


@jit()
def _apply(P, u, v, PRECISION: tl.constexpr):
    return tl.dot(P, u, input_precision=PRECISION), tl.dot(P, v, input_precision=PRECISION)


@jit()
def _contract(by_square, by_linear, u, dM, PRECISION: tl.constexpr):
    """What the slopes of P mean for the result. (P's own gradient, a product over channels, would spill registers.)"""
    square = tl.sum(tl.dot(by_square, u, input_precision=PRECISION) * dM)
    return square, tl.sum(tl.dot(by_linear, u, input_precision=PRECISION) * dM)


@jit()
def _lanes(block, lane, C: tl.constexpr, K: tl.constexpr, LANES: tl.constexpr):
    """Block ``block`` of LANES channels, none of which are of two heads: the head, the channels, and which exist."""
    BLOCKS: tl.constexpr = (C // K + LANES - 1) // LANES
    channel = block % BLOCKS * LANES + lane
    return block // BLOCKS, block // BLOCKS * (C // K) + channel, channel < C // K


@jit()
def _load_head(
    x, token, k, there, eps, C: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, PRENORM: tl.constexpr
):  # fmt: skip
    """A head's slice of tokens: z, the scale x was multiplied by, and which of it exists."""
    channel = tl.arange(0, WIDTH)[None]
    mask = there[:, None] & (channel < C // K)
    z = tl.load(x + token[:, None] * C + k * (C // K) + channel, mask=mask, other=0.0).to(tl.float32)
    scale = tl.zeros_like(token).to(tl.float32) + 1.0
    if PRENORM:
        scale = tl.rsqrt(tl.sum(z * z, 1) / (C // K) + eps)
        z = tl.where(mask, z * scale[:, None], 0.0)
    return z, scale, mask


@jit(do_not_specialize=SIZES)
def _statistics(
    x, of_tokens, shifts, cells, eps, size, tiles, H, W, h, w, C: tl.constexpr, K: tl.constexpr, S: tl.constexpr,
    WIDTH: tl.constexpr, TILE: tl.constexpr, PRENORM: tl.constexpr, UNBIASED: tl.constexpr, SECOND: tl.constexpr,
    FORWARD: tl.constexpr,
):  # fmt: skip
    """Scales, mean and variance of each token; mean and variance (``SECOND``) of z in each cell; parts of the shift."""
    c: tl.constexpr = C // K
    program = tl.program_id(0).to(tl.int64)
    b = program // tiles
    cell = (program % tiles).to(tl.int32) * TILE + tl.arange(0, TILE)
    exists = cell < h * w
    real = tl.arange(0, WIDTH) < c
    shifts += program * C + tl.arange(0, WIDTH)
    if FORWARD:
        for offset in range(S * S):
            y, x_ = cell // w * S + offset // S, cell % w * S + offset % S
            there = exists & (y < H) & (x_ < W)
            token = (b * H + y) * W + x_
            mean = tl.zeros([TILE], tl.float32)
            squares = tl.zeros([TILE], tl.float32)
            for k in range(K):  # adds each head to those before it as Chan does: exact far from 0 too
                z, scale, mask = _load_head(x, token, k, there, eps, C, K, WIDTH, PRENORM)
                head_mean = tl.sum(z, 1) / c
                deviation = tl.where(mask, z - head_mean[:, None], 0.0)
                change = head_mean - mean
                mean += change / (k + 1)
                squares += tl.sum(deviation * deviation, 1) + change * change * (c * k / (k + 1))
                tl.store(of_tokens + token * (K + 2) + k, scale, mask=there)
                if S == 1:
                    tl.store(shifts + k * c, tl.sum(z, 0) / (h * w), mask=real)
            tl.store(of_tokens + token * (K + 2) + K, mean, mask=there)
            tl.store(of_tokens + token * (K + 2) + K + 1, squares / (C - UNBIASED), mask=there)
    if S > 1:
        for k in range(K):
            first = tl.zeros([TILE, WIDTH], tl.float32)
            second = tl.zeros([TILE, WIDTH], tl.float32)
            number = tl.zeros([TILE], tl.float32)
            for offset in range(S * S):  # adds each token to those before it as Welford does
                y, x_ = cell // w * S + offset // S, cell % w * S + offset % S
                there = exists & (y < H) & (x_ < W)
                z, scale, mask = _load_head(x, (b * H + y) * W + x_, k, there, eps, C, K, WIDTH, PRENORM)
                number += tl.where(there, 1.0, 0.0)
                change = tl.where(mask, z - first, 0.0)
                first += change / tl.maximum(number, 1.0)[:, None]
                second += change * tl.where(mask, z - first, 0.0)
            at = cells + (b * h * w + cell[:, None]) * C + k * c + tl.arange(0, WIDTH)[None]
            tl.store(at, first, mask=exists[:, None] & real[None])
            if SECOND:
                tl.store(at + size, second / tl.maximum(number, 1.0)[:, None], mask=exists[:, None] & real[None])
            if FORWARD:
                tl.store(shifts + k * c, tl.sum(first, 0) / (h * w), mask=real)


@jit()
def _load_cells(
    x, of_tokens, size, cell, k, channel, shift, mask, C: tl.constexpr, K: tl.constexpr, S: tl.constexpr,
    SECOND: tl.constexpr,
):  # fmt: skip
    """u and v. Pooled, ``x`` has the cells' means and, with ``SECOND``, their variances ``size`` further on."""
    z = tl.load(x + cell * C + channel, mask=mask, other=0.0).to(tl.float32)
    if S == 1:
        z *= tl.load(of_tokens + cell * (K + 2) + k, mask=mask, other=0.0)
    u = tl.where(mask, z - shift, 0.0)
    v = u * u
    if SECOND and S > 1:
        v += tl.load(x + size + cell * C + channel, mask=mask, other=0.0)
    return u, v


@jit(do_not_specialize=SIZES)
def _rows(
    x, of_tokens, of_channels, kernel, maps, size, h, w, stride, C: tl.constexpr, K: tl.constexpr, S: tl.constexpr,
    SECOND: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr, Q: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """P_x u and P_x v."""
    k, channel, real = _lanes(tl.program_id(0) % BLOCKS, tl.arange(0, LANES)[None], C, K, LANES)
    program = tl.program_id(0) // BLOCKS
    row = (program // tl.cdiv(w, Q)).to(tl.int64)
    query = program % tl.cdiv(w, Q) * Q + tl.arange(0, Q)
    shift = tl.load(of_channels + row // h * C + channel, mask=real, other=0.0)
    U = tl.zeros([Q, LANES], tl.float32)
    V = tl.zeros([Q, LANES], tl.float32)
    for start in range(0, w, N):
        key = start + tl.arange(0, N)
        mask = (key < w)[:, None] & real
        u, v = _load_cells(x, of_tokens, size, row * w + key[:, None], k, channel, shift, mask, C, K, S, SECOND)
        part_U, part_V = _apply(_load_kernel(kernel, k, query, key, w, stride), u, v, PRECISION)
        U += part_U
        V += part_V
    at = maps + (row * w + query[:, None]) * C + channel
    tl.store(at, U, mask=(query < w)[:, None] & real)
    tl.store(at + size, V, mask=(query < w)[:, None] & real)


@jit()
def _column_moments(
    maps, size, first, w, kernel, k, query, n, stride, channel, real, C: tl.constexpr, LANES: tl.constexpr,
    Q: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """M and V of some cells of the column that begins at cell ``first``, from what ``_rows`` wrote."""
    M = tl.zeros([Q, LANES], tl.float32)
    V = tl.zeros([Q, LANES], tl.float32)
    for start in range(0, n, N):
        key = start + tl.arange(0, N)
        at = maps + (first + key[:, None] * w) * C + channel
        mask = (key < n)[:, None] & real
        U, U2 = tl.load(at, mask=mask, other=0.0), tl.load(at + size, mask=mask, other=0.0)
        part_M, part_V = _apply(_load_kernel(kernel, k, query, key, n, stride), U, U2, PRECISION)
        M += part_M
        V += part_V
    return M, V - M * M


@jit()
def _normalise(
    x, of_tokens, token, k, channel, shift, mask, M, V, mean_lambda, var_lambda, eps, C: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """A token normalised, the inverse of its deviation, its own mean (less the shift, like M) and its own variance."""
    of_token = of_tokens + token * (K + 2)
    l, m = tl.load(mean_lambda + k), tl.load(var_lambda + k)
    mean = tl.load(of_token + K, mask=mask, other=0.0) - shift
    var = tl.load(of_token + K + 1, mask=mask, other=1.0)
    inverse = tl.rsqrt(m * var + (1 - m) * tl.maximum(V, 0.0) + eps)
    z = tl.load(x + token * C + channel, mask=mask, other=0.0).to(tl.float32)
    u = z * tl.load(of_token + k, mask=mask, other=0.0) - shift
    return (u - l * mean - (1 - l) * M) * inverse, inverse, mean, var


@jit(do_not_specialize=SIZES)
def _columns(
    x, of_tokens, of_channels, kernel, maps, weight, bias, mean_lambda, var_lambda, output, eps, size, H, W, h, w,
    stride, C: tl.constexpr, K: tl.constexpr, S: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr,
    Q: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """P_y of what ``_rows`` wrote, and the tokens of those cells normalised."""
    k, channel, real = _lanes(tl.program_id(0) % BLOCKS, tl.arange(0, LANES)[None], C, K, LANES)
    program = tl.program_id(0) // BLOCKS
    column = (program // tl.cdiv(h, Q)).to(tl.int64)
    query = program % tl.cdiv(h, Q) * Q + tl.arange(0, Q)
    b, column = column // w, column % w
    first = b * h * w + column
    M, V = _column_moments(maps, size, first, w, kernel, k, query, h, stride, channel, real, C, LANES, Q, N, PRECISION)
    shift = tl.load(of_channels + b * C + channel, mask=real, other=0.0)
    a, to = tl.load(weight + channel, mask=real), tl.load(bias + channel, mask=real)
    for offset in range(S * S):
        y, x_ = query[:, None] * S + offset // S, column * S + offset % S
        token = (b * H + y) * W + x_
        mask = (y < H) & (x_ < W) & real
        t, _inverse, _mean, _var = _normalise(
            x, of_tokens, token, k, channel, shift, mask, M, V, mean_lambda, var_lambda, eps, C, K
        )
        tl.store(output + token * C + channel, t * a + to, mask=mask)


@jit()
def _swap(tile, LANES: tl.constexpr):
    """y x (x, lanes) to x x (y, lanes), and back."""
    return tl.permute(tile.reshape(16, 16, LANES), (1, 0, 2)).reshape(16, 16 * LANES)


@jit()
def _grid_rows(
    x, of_tokens, P_x, h, w, along, k, channel, shift, real, C: tl.constexpr, K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """u, P_x u and P_x v of an image, x x (y, lanes)."""
    at_x = tl.arange(0, 16)[:, None]
    mask = (along < h) & (at_x < w) & real
    u, v = _load_cells(x, of_tokens, 0, along * w + at_x, k, channel, shift, mask, C, K, 1, False)
    U, V = _apply(P_x, u, v, PRECISION)
    return u, U, V


@jit(do_not_specialize=SIZES)
def _grid(
    x, of_tokens, of_channels, kernel_y, kernel_x, weight, bias, mean_lambda, var_lambda, output, eps, h, w, stride_y,
    stride_x, C: tl.constexpr, K: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """P along both axes, and the tokens normalised: some channels of one head of an image of up to 16 x 16 cells."""
    b = (tl.program_id(0) // BLOCKS).to(tl.int64)
    lane = tl.arange(0, 16 * LANES)[None]  # a channel of one of 16 cells in a row, or in a column
    along = lane // LANES
    k, channel, real = _lanes(tl.program_id(0) % BLOCKS, lane % LANES, C, K, LANES)
    shift = tl.load(of_channels + b * C + channel, mask=real, other=0.0)
    x, output, of_tokens = x + b * h * w * C, output + b * h * w * C, of_tokens + b * h * w * (K + 2)
    side = tl.arange(0, 16)
    P_x = _load_kernel(kernel_x, k, side, side, w, stride_x)
    P_y = _load_kernel(kernel_y, k, side, side, h, stride_y)
    _u, U, V = _grid_rows(x, of_tokens, P_x, h, w, along, k, channel, shift, real, C, K, PRECISION)
    M, V = _apply(P_y, _swap(U, LANES), _swap(V, LANES), PRECISION)
    V -= M * M
    y = side[:, None]
    token = y * w + along
    mask = (y < h) & (along < w) & real
    t, _inverse, _mean, _var = _normalise(
        x, of_tokens, token, k, channel, shift, mask, M, V, mean_lambda, var_lambda, eps, C, K
    )
    t = t * tl.load(weight + channel, mask=real) + tl.load(bias + channel, mask=real)
    tl.store(output + token * C + channel, t, mask=mask)


@jit()
def _differentiate(grad, at, weight, t, inverse, mean, var, M, V, mask):
    """Gradients of the output, of -mu, of the variance; and what weight and lambdas get, before it is added up."""
    gradient = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
    g = tl.where(mask, gradient * weight * inverse, 0.0)
    e = tl.where(mask, -0.5 * g * t * inverse, 0.0)
    return gradient, g, e, tl.where(mask, gradient * t, 0.0), g * (M - mean), e * (var - tl.maximum(V, 0.0))


@jit(do_not_specialize=SIZES)
def _grid_backward(
    grad, x, of_tokens, of_channels, kernel_y, kernel_x, moments_y, moments_x, weight, mean_lambda, var_lambda, direct,
    to_tokens, by_channel, by_head, slopes, eps, h, w, stride_y, stride_x, C: tl.constexpr, K: tl.constexpr,
    LANES: tl.constexpr, BLOCKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of z but for the token's own statistics, what those need, and parts of the parameters' gradients."""
    block = tl.program_id(0) % BLOCKS
    b = (tl.program_id(0) // BLOCKS).to(tl.int64)
    lane = tl.arange(0, 16 * LANES)[None]
    along = lane // LANES
    k, channel, real = _lanes(block, lane % LANES, C, K, LANES)
    shift = tl.load(of_channels + b * C + channel, mask=real, other=0.0)
    x, grad, direct = x + b * h * w * C, grad + b * h * w * C, direct + b * h * w * C
    of_tokens, to_tokens = of_tokens + b * h * w * (K + 2), to_tokens + b * h * w * BLOCKS * 2
    side = tl.arange(0, 16)
    P_x = _load_kernel(kernel_x, k, side, side, w, stride_x)
    P_y = _load_kernel(kernel_y, k, side, side, h, stride_y)
    u, U, V = _grid_rows(x, of_tokens, P_x, h, w, along, k, channel, shift, real, C, K, PRECISION)
    M, V = _apply(P_y, _swap(U, LANES), _swap(V, LANES), PRECISION)
    V -= M * M
    y = side[:, None]
    token = y * w + along
    mask = (y < h) & (along < w) & real
    t, inverse, mean, var = _normalise(
        x, of_tokens, token, k, channel, shift, mask, M, V, mean_lambda, var_lambda, eps, C, K
    )
    a = tl.load(weight + channel, mask=real, other=0.0)
    gradient, g, e, to_weight, to_l, to_m = _differentiate(
        grad, token * C + channel, a, t, inverse, mean, var, M, V, mask
    )
    tl.store(by_head + b * 2 * BLOCKS + block, tl.sum(to_l))
    tl.store(by_head + (b * 2 + 1) * BLOCKS + block, tl.sum(to_m))
    _, own, exists = _lanes(block, tl.arange(0, LANES), C, K, LANES)
    tl.store(by_channel + b * 2 * C + own, tl.sum(tl.sum(to_weight, 0).reshape(16, LANES), 0), mask=exists)
    tl.store(by_channel + (b * 2 + 1) * C + own, tl.sum(tl.sum(gradient, 0).reshape(16, LANES), 0), mask=exists)
    l, m = tl.load(mean_lambda + k), tl.load(var_lambda + k)
    at = to_tokens + ((y * w + side[None]) * BLOCKS + block) * 2
    tl.store(at, l * tl.sum(g.reshape(16, 16, LANES), 2), mask=(y < h) & (side < w)[None])
    tl.store(at + 1, m * tl.sum(e.reshape(16, 16, LANES), 2), mask=(y < h) & (side < w)[None])
    dV = (1 - m) * e
    dM = -(1 - l) * g - 2 * M * dV
    # Loaded again, here and below: kept, they would spill registers.
    P_x = _load_kernel(kernel_x, k, side, side, w, stride_x)
    u, U, V = _grid_rows(x, of_tokens, P_x, h, w, along, k, channel, shift, real, C, K, PRECISION)
    P_y = _load_kernel(kernel_y, k, side, side, h, stride_y)
    by_square, by_linear = _slopes(P_y, moments_y, k, side, side, h)
    square, linear = _contract(by_square, by_linear, _swap(U, LANES), dM, PRECISION)
    more_square, more_linear = _contract(by_square, by_linear, _swap(V, LANES), dV, PRECISION)
    slopes += (b * BLOCKS + block) * 3
    tl.store(slopes + 2, linear + more_linear)
    square += more_square
    dM, dV = _apply(tl.trans(P_y), dM, dV, PRECISION)
    dM, dV = _swap(dM, LANES), _swap(dV, LANES)
    P_x = _load_kernel(kernel_x, k, side, side, w, stride_x)
    u, U, V = _grid_rows(x, of_tokens, P_x, h, w, along, k, channel, shift, real, C, K, PRECISION)
    by_square, by_linear = _slopes(P_x, moments_x, k, side, side, w)
    more_square, linear = _contract(by_square, by_linear, u, dM, PRECISION)
    square += more_square
    more_square, more_linear = _contract(by_square, by_linear, u * u, dV, PRECISION)
    tl.store(slopes, square + more_square)
    tl.store(slopes + 1, linear + more_linear)
    dM, dV = _apply(tl.trans(P_x), dM, dV, PRECISION)
    at = (along * w + y) * C + channel  # here rows are x, and lanes are y
    tl.store(direct + at, _swap(g, LANES) + dM + 2 * u * dV, mask=(along < h) & (y < w) & real)


@jit(do_not_specialize=SIZES)
def _columns_backward(
    grad, x, of_tokens, of_channels, kernel, moments, maps, weight, mean_lambda, var_lambda, kept, to_tokens,
    by_channel, by_head, slopes, scratch, eps, size, H, W, h, w, stride, tasks, programs, C: tl.constexpr,
    K: tl.constexpr, S: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr, Q: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Replaces what ``_rows`` wrote by P_y^T of the gradients of M and V; parts of the parameters' gradients.

    ``kept`` gets, unpooled, the gradient of -mu, and otherwise M and V. A program owns one column of cells after the
    other, and adds up those of more than Q cells in its own part of ``scratch``.
    """
    program = tl.program_id(0).to(tl.int64)
    for task in range(program, tasks, programs):
        block, column = task % BLOCKS, task // BLOCKS
        b, at_x = column // w, column % w
        first = b * h * w + at_x
        lane = tl.arange(0, LANES)[None]
        k, channel, real = _lanes(block, lane, C, K, LANES)
        shift = tl.load(of_channels + b * C + channel, mask=real, other=0.0)
        a = tl.load(weight + channel, mask=real, other=0.0)
        l, m = tl.load(mean_lambda + k), tl.load(var_lambda + k)
        to_weight = tl.zeros([1, LANES], tl.float32)
        to_bias = tl.zeros([1, LANES], tl.float32)
        to_l, to_m, square, linear = 0.0, 0.0, 0.0, 0.0
        for begin in range(0, h, Q):
            query = begin + tl.arange(0, Q)
            M, V = _column_moments(
                maps, size, first, w, kernel, k, query, h, stride, channel, real, C, LANES, Q, N, PRECISION
            )
            dM = tl.zeros([Q, LANES], tl.float32)
            dV = tl.zeros([Q, LANES], tl.float32)
            for offset in range(S * S):
                y, x_ = query[:, None] * S + offset // S, at_x * S + offset % S
                token = (b * H + y) * W + x_
                there = (y < H) & (x_ < W)
                mask = there & real
                t, inverse, mean, var = _normalise(
                    x, of_tokens, token, k, channel, shift, mask, M, V, mean_lambda, var_lambda, eps, C, K
                )
                gradient, g, e, for_weight, for_l, for_m = _differentiate(
                    grad, token * C + channel, a, t, inverse, mean, var, M, V, mask
                )
                to_weight += tl.sum(for_weight, 0)[None]
                to_bias += tl.sum(gradient, 0)[None]
                to_l += tl.sum(for_l)
                to_m += tl.sum(for_m)
                dM -= (1 - l) * g
                dV += (1 - m) * e
                side = to_tokens + (token * BLOCKS + block) * 2
                tl.store(side, l * tl.sum(g, 1)[:, None], mask=there)
                tl.store(side + 1, m * tl.sum(e, 1)[:, None], mask=there)
                if S == 1:
                    tl.store(kept + token * C + channel, g, mask=mask)
            if S > 1:
                of_cell = kept + (first + query[:, None] * w) * C + channel
                tl.store(of_cell, M, mask=(query < h)[:, None] & real)
                tl.store(of_cell + size, V, mask=(query < h)[:, None] & real)
            dM -= 2 * M * dV
            for start in range(0, h, N):
                key = start + tl.arange(0, N)
                inside = (key < h)[:, None] & real
                pair = maps + (first + key[:, None] * w) * C + channel
                P = _load_kernel(kernel, k, query, key, h, stride)
                U, U2 = tl.load(pair, mask=inside, other=0.0), tl.load(pair + size, mask=inside, other=0.0)
                by_square, by_linear = _slopes(P, moments, k, query, key, h)
                s1, l1 = _contract(by_square, by_linear, U, dM, PRECISION)
                s2, l2 = _contract(by_square, by_linear, U2, dV, PRECISION)
                square += s1 + s2
                linear += l1 + l2
                dU, dU2 = _apply(tl.trans(P), dM, dV, PRECISION)
                mine = scratch + (program * 2 * h + key[:, None]) * LANES + lane
                if begin > 0:
                    dU += tl.load(mine, mask=inside, other=0.0)
                    dU2 += tl.load(mine + h * LANES, mask=inside, other=0.0)
                tl.debug_barrier()  # all threads have read what is written now
                if begin + Q < h:
                    tl.store(mine, dU, mask=inside)
                    tl.store(mine + h * LANES, dU2, mask=inside)
                else:
                    tl.store(pair, dU, mask=inside)
                    tl.store(pair + size, dU2, mask=inside)
            tl.debug_barrier()
        tl.store(by_channel + column * 2 * C + channel, to_weight, mask=real)
        tl.store(by_channel + (column * 2 + 1) * C + channel, to_bias, mask=real)
        tl.store(by_head + column * 2 * BLOCKS + block, to_l)
        tl.store(by_head + (column * 2 + 1) * BLOCKS + block, to_m)
        tl.store(slopes + task * 3, square)
        tl.store(slopes + task * 3 + 1, 0.0)
        tl.store(slopes + task * 3 + 2, linear)


@jit(do_not_specialize=SIZES)
def _rows_backward(
    x, of_tokens, of_channels, kernel, moments, maps, direct, slopes, size, h, w, stride, C: tl.constexpr,
    K: tl.constexpr, S: tl.constexpr, SECOND: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr, Q: tl.constexpr,
    N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """P_x^T of what ``_columns_backward`` wrote, the gradients of u and v; unpooled, as part of the gradient of z."""
    k, channel, real = _lanes(tl.program_id(0) % BLOCKS, tl.arange(0, LANES)[None], C, K, LANES)
    program = tl.program_id(0) // BLOCKS
    row = (program // tl.cdiv(w, N)).to(tl.int64)
    key = program % tl.cdiv(w, N) * N + tl.arange(0, N)
    shift = tl.load(of_channels + row // h * C + channel, mask=real, other=0.0)
    cell = row * w + key[:, None]
    mask = (key < w)[:, None] & real
    u, v = _load_cells(x, of_tokens, size, cell, k, channel, shift, mask, C, K, S, SECOND)
    du = tl.zeros([N, LANES], tl.float32)
    dv = tl.zeros([N, LANES], tl.float32)
    square, linear = 0.0, 0.0
    for start in range(0, w, Q):
        query = start + tl.arange(0, Q)
        at = maps + (row * w + query[:, None]) * C + channel
        dU = tl.load(at, mask=(query < w)[:, None] & real, other=0.0)
        dU2 = tl.load(at + size, mask=(query < w)[:, None] & real, other=0.0)
        P = _load_kernel(kernel, k, query, key, w, stride)
        by_square, by_linear = _slopes(P, moments, k, query, key, w)
        s1, l1 = _contract(by_square, by_linear, u, dU, PRECISION)
        s2, l2 = _contract(by_square, by_linear, v, dU2, PRECISION)
        square += s1 + s2
        linear += l1 + l2
        part_du, part_dv = _apply(tl.trans(P), dU, dU2, PRECISION)
        du += part_du
        dv += part_dv
    slopes += tl.program_id(0).to(tl.int64) * 3
    tl.store(slopes, square)
    tl.store(slopes + 1, linear)
    tl.store(slopes + 2, 0.0)
    direct += cell * C + channel
    if S == 1 or not SECOND:
        du += 2 * u * dv
    if S == 1:
        du += tl.load(direct, mask=mask, other=0.0)
    tl.store(direct, du, mask=mask)
    if S > 1 and SECOND:
        tl.store(direct + size, dv, mask=mask)


@jit(do_not_specialize=SIZES)
def _tokens_backward(
    grad, x, of_tokens, of_channels, weight, mean_lambda, var_lambda, to_tokens, kept, direct, grad_x, eps, size,
    tokens, H, W, h, w, C: tl.constexpr, K: tl.constexpr, S: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    BLOCKS: tl.constexpr, PARTS: tl.constexpr, PRENORM: tl.constexpr, UNBIASED: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """The gradient of x: through the cell of a token, the token's own statistics and its root mean squares."""
    c: tl.constexpr = C // K
    token = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = token < tokens
    part = tl.arange(0, PARTS)[None]
    counted = there[:, None] & (part < BLOCKS)
    parts = to_tokens + (token[:, None] * BLOCKS + part) * 2
    to_mean = tl.sum(tl.load(parts, mask=counted, other=0.0), 1)[:, None] / C
    to_var = tl.sum(tl.load(parts + 1, mask=counted, other=0.0), 1)[:, None] * (2 / (C - UNBIASED))
    mean = tl.load(of_tokens + token * (K + 2) + K, mask=there, other=0.0)[:, None]
    if S > 1:
        b, y, x_ = token // (H * W), token // W % H, token % W
        cell = ((b * h + y // S) * w + x_ // S)[:, None]
        number = tl.minimum(H - y // S * S, S) * tl.minimum(W - x_ // S * S, S)
        share = 1 / number.to(tl.float32)[:, None]
    for k in range(K):
        channel = k * c + tl.arange(0, WIDTH)[None]
        mask = there[:, None] & (channel < (k + 1) * c)
        at = token[:, None] * C + channel
        scale = tl.load(of_tokens + token * (K + 2) + k, mask=there, other=0.0)[:, None]
        z = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) * scale
        if S == 1:
            dz = tl.load(direct + at, mask=mask, other=0.0)
        else:
            of_cell = cell * C + channel
            shift = tl.load(of_channels + b[:, None] * C + channel, mask=mask, other=0.0)
            M = tl.load(kept + of_cell, mask=mask, other=0.0)
            V = tl.load(kept + size + of_cell, mask=mask, other=0.0)
            t, inverse, _, var = _normalise(
                x, of_tokens, token[:, None], k, channel, shift, mask, M, V, mean_lambda, var_lambda, eps, C, K
            )
            a = tl.load(weight + channel, mask=channel < (k + 1) * c, other=0.0)
            _gradient, dz, _e, _, _, _ = _differentiate(grad, at, a, t, inverse, mean - shift, var, M, V, mask)
            dz += tl.load(direct + of_cell, mask=mask, other=0.0) * share
            if SECOND:
                dz += 2 * (z - shift) * tl.load(direct + size + of_cell, mask=mask, other=0.0) * share
        dz += to_var * (z - mean) - to_mean
        if PRENORM:
            dz = tl.where(mask, dz, 0.0)
            dz = scale * (dz - z * (tl.sum(dz * z, 1) / c)[:, None])
        tl.store(grad_x + at, dz, mask=mask)


class _Problem:
    """The sizes of a call, the blocks its kernels work on, and the launches that forward and backward share."""

    def __init__(self, x: Tensor, position: Tensor, s: Settings) -> None:
        self.x, self.position, self.s = x, position, s
        self.B, self.H, self.W, self.C = x.shape
        self.K, self.eps = len(position), float(s.eps)
        self.h, self.w = (-(-side // s.pool_size) for side in (self.H, self.W))
        self.small = s.pool_size == 1 and max(self.h, self.w) <= SMALL
        self.size = self.B * self.h * self.w * self.C  # of a map of cells
        self.stride_y, self.stride_x = (triton.cdiv(side, 16) * 16 for side in (self.h, self.w))
        self.grid = dict(H=self.H, W=self.W, h=self.h, w=self.w)
        # Tiles of whole heads, for passes over tokens
        width = triton.next_power_of_2(self.C // self.K)
        self.tile = max(1, min(64, 2048 // width))
        self.by_token = dict(
            C=self.C, K=self.K, S=s.pool_size, WIDTH=width, TILE=self.tile, PRENORM=s.prenorm, UNBIASED=int(s.unbiased),
            SECOND=s.pool_second_moment, num_warps=4 if width <= 1024 else 8,
        )  # fmt: skip
        # Blocks of channels, for products with P: sizes that do not spill registers (test_dtn_triton_compiled.py)
        self.lanes = 16 if self.small else min(max(width, 32), 64)
        self.blocks = self.K * triton.cdiv(self.C // self.K, self.lanes)
        self.by_block = dict(
            C=self.C, K=self.K, LANES=self.lanes, BLOCKS=self.blocks,
            num_warps=8 if self.small or self.lanes == 64 else 4, PRECISION='ieee' if torch.version.hip else 'tf32x3',
        )  # fmt: skip
        self.products = dict(self.by_block, S=s.pool_size, N=16)

    def empty(self, *shape: int) -> Tensor:
        return self.x.new_empty(shape, dtype=torch.float32)

    def axes(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """P_y, P_x, and what the slopes of either need."""
        K, h, w = self.K, self.h, self.w
        kernels, moments = self.empty(K * (h * self.stride_y + w * self.stride_x)), self.empty(K * (h + w) * 3)
        keys = triton.next_power_of_2(max(self.stride_y, self.stride_x))
        rows = max(1, min(16, 2048 // keys))
        _axes[(triton.cdiv(max(h, w), rows), K, 2)](
            self.position, kernels, moments, h, w, self.stride_y, self.stride_x, K=K, ROWS=rows, KEYS=keys,
            IDENTITY=self.s.identity,
        )  # fmt: skip
        return kernels, kernels[K * h * self.stride_y :], moments, moments[K * h * 3 :]

    def statistics(self, of_tokens: Tensor, forward: bool) -> tuple[Tensor, Tensor]:
        """The shift of each channel, B x C (``forward``), and what takes part in P: tokens, or means of cells."""
        tiles, cells = triton.cdiv(self.h * self.w, self.tile), self.x
        shifts = self.empty(self.B, tiles, self.C) if forward else self.x
        if self.s.pool_size > 1:
            cells = self.empty(1 + self.s.pool_second_moment, self.size)
        _statistics[(self.B * tiles,)](
            self.x, of_tokens, shifts, cells, self.eps, self.size, tiles, **self.grid, **self.by_token, FORWARD=forward
        )
        return shifts.sum(1) if forward else shifts, cells

    def rows(self, cells: Tensor, of_tokens: Tensor, of_channels: Tensor, kernel: Tensor) -> Tensor:
        maps = self.empty(2, self.size)
        _rows[(self.B * self.h * triton.cdiv(self.w, 32) * self.blocks,)](
            cells, of_tokens, of_channels, kernel, maps, self.size, self.h, self.w, self.stride_x, Q=32,
            SECOND=self.s.pool_second_moment, **self.products,
        )  # fmt: skip
        return maps


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean_lambda: Tensor,
    var_lambda: Tensor,
    position: Tensor,
    s: Settings,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output; for each token the scale of each head, mean and variance; the shift, B x C."""
    with torch.cuda.device_of(x):
        p = _Problem(x, position, s)
        y, of_tokens = torch.empty_like(x, dtype=dtype), p.empty(p.B, p.H, p.W, p.K + 2)
        P_y, P_x, *_ = p.axes()
        of_channels, cells = p.statistics(of_tokens, forward=True)
        affine = weight, bias, mean_lambda, var_lambda, y, p.eps
        if p.small:
            _grid[(p.B * p.blocks,)](
                x, of_tokens, of_channels, P_y, P_x, *affine, p.h, p.w, p.stride_y, p.stride_x, **p.by_block
            )
        else:
            maps = p.rows(cells, of_tokens, of_channels, P_x)
            _columns[(p.B * p.w * triton.cdiv(p.h, 32) * p.blocks,)](
                x, of_tokens, of_channels, P_y, maps, *affine, p.size, **p.grid, stride=p.stride_y, Q=32, **p.products
            )
    return y, of_tokens.view(-1), of_channels


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean_lambda: Tensor,
    var_lambda: Tensor,
    position: Tensor,
    of_tokens: Tensor,
    of_channels: Tensor,
    s: Settings,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """From the gradient of the output, and what ``forward`` returned, the gradients of x and of the parameters."""
    with torch.cuda.device_of(x):
        p = _Problem(x, position, s)
        P_y, P_x, moments_y, moments_x = p.axes()
        known = x, of_tokens, of_channels
        parts = p.B if p.small else p.B * p.w
        slices = 0 if p.small else p.B * p.h * triton.cdiv(p.w, 16)
        by_channel, by_head = p.empty(parts, 2, p.C), p.empty(parts, 2, p.K, p.blocks // p.K)
        slopes = p.empty(parts + slices, p.K, p.blocks // p.K, 3)
        to_tokens = p.empty(p.B * p.H * p.W, p.blocks, 2)
        kept = direct = p.empty(1 if s.pool_size == 1 else 2, p.size)
        sums = to_tokens, by_channel, by_head, slopes
        if p.small:
            _grid_backward[(p.B * p.blocks,)](
                grad, *known, P_y, P_x, moments_y, moments_x, weight, mean_lambda, var_lambda, direct, *sums, p.eps,
                p.h, p.w, p.stride_y, p.stride_x, **p.by_block,
            )  # fmt: skip
        else:
            cells = x
            if s.pool_size > 1:
                _, cells = p.statistics(of_tokens, forward=False)
                direct = p.empty(1 + s.pool_second_moment, p.size)
            maps = p.rows(cells, of_tokens, of_channels, P_x)
            tasks = parts * p.blocks
            programs = tasks if p.h <= 16 else min(512, triton.cdiv(tasks, 4))
            scratch = maps if p.h <= 16 else p.empty(programs, 2, p.h, p.lanes)
            _columns_backward[(programs,)](
                grad, *known, P_y, moments_y, maps, weight, mean_lambda, var_lambda, kept, *sums, scratch, p.eps,
                p.size, **p.grid, stride=p.stride_y, tasks=tasks, programs=programs, Q=16, **p.products,
            )  # fmt: skip
            _rows_backward[(slices * p.blocks,)](
                cells, of_tokens, of_channels, P_x, moments_x, maps, direct, slopes[parts:], p.size, p.h, p.w,
                p.stride_x, Q=32, SECOND=s.pool_second_moment, **p.products,
            )  # fmt: skip
        grad_x, tokens = torch.empty_like(x), p.B * p.H * p.W
        _tokens_backward[(triton.cdiv(tokens, p.tile),)](
            grad, *known, weight, mean_lambda, var_lambda, to_tokens, kept, direct, grad_x, p.eps, p.size, tokens,
            **p.grid, **p.by_token, BLOCKS=p.blocks, PARTS=triton.next_power_of_2(p.blocks),
        )  # fmt: skip
        of_lambdas = by_head[:, 0].sum((0, 2)), by_head[:, 1].sum((0, 2))
        return grad_x, by_channel[:, 0].sum(0), by_channel[:, 1].sum(0), *of_lambdas, slopes.sum((0, 2))


# What a check on a device compares with the reference: grid, channels, heads, pool size.
CHECKS = [((5, 7), 48, 3, 1), ((17, 3), 40, 1, 1), ((5, 7), 24, 2, 2)]
# Largest difference over the reference's size, as norms of whole tensors: of the output and of gradients.
TOLERANCES = {torch.float32: (1e-5, 1e-4), torch.float16: (2e-3, 4e-3), torch.bfloat16: (1e-2, 2e-2)}

_found: dict[torch.device, str | None] = {}  # by each process for itself
_agreed: dict[torch.device, str | None] = {}  # by all processes of a training run


def works(device: torch.device) -> bool:
    """Whether the kernels may compute on ``device``; the first use of a device in a process checks them.

    Inside a custom operator torch has switched gradients off: a distributed run asks before it calls the operator.
    """
    if triton is None:
        return False
    training = torch.is_grad_enabled() and is_distributed()
    known = _agreed if training or device in _agreed else _found
    if device not in known:
        if torch.compiler.is_compiling() or not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
            return True  # cannot tell yet
        if device not in _found:
            _found[device] = self_check(device)
            if _found[device]:
                _warn(f'on {device}: {_found[device]}')
        if training:
            failed = torch.tensor(int(_found[device] is not None), device=device)
            all_reduce(failed, 'max')
            _agreed[device] = 'on another device of this run' if failed and not _found[device] else _found[device]
            if failed and not _found[device]:
                _warn('on another device of this run')
    return known[device] is None


def _warn(what: str) -> None:
    warnings.warn(
        f"DTN's Triton kernels failed their check {what}. The plain torch form computes DTN from now on: the results "
        'are right, but it is slower. `python -m mmdtn.doctor` tells more.',
        stacklevel=2,
    )


def self_check(device: torch.device) -> str | None:
    """Runs small layers both ways on ``device``; None if all is well, else what is wrong."""
    generator = torch.Generator().manual_seed(0)
    for dtype, (forward_tolerance, backward_tolerance) in TOLERANCES.items():
        for grid, C, K, pool_size in CHECKS:
            s, case = Settings(pool_size), f'{dtype}, {grid[0]} x {grid[1]} tokens, pool_size={pool_size}'
            x, grad = (torch.randn(2, *grid, C, generator=generator).to(device, dtype) for _ in range(2))
            weight, bias, l, m = (torch.rand(n, generator=generator).to(device) for n in (C, C, K, K))
            position = torch.randn(K, 3, generator=generator).to(device) / 4
            try:
                y, of_tokens, of_channels = forward(x, weight, bias, l, m, position, s, dtype)
                gradients = backward(grad, x, weight, bias, l, m, position, of_tokens, of_channels, s)
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as error:  # a compiler raises anything
                return f'{case}: {type(error).__name__}: {error}'
            tensors = [t.double() for t in (x, weight, bias, l, m, position)]
            expected, pull_back, *_ = torch.func.vjp(partial(reference.dtn, s=s), *tensors)
            pairs = zip((y, *gradients), (expected, *pull_back(grad.double())), strict=True)
            for name, (ours, right) in zip(('output', *NAMES), pairs, strict=True):
                difference = ((ours.double() - right).norm() / right.norm()).item()
                limit = forward_tolerance if name == 'output' else backward_tolerance
                if not difference <= limit:
                    return f'{case}: {name} differs from the reference by {difference:.1e}, more than {limit:.0e}'
    return None
