"""DTN on GPUs: Triton kernels for the passes over tokens and for P, forward and backward.

Letters as in docs/mathematics.md: z is a prenormalised token, ``shift`` its channel's mean over the cells of the image,
u a cell's mean of z - shift, v the mean of its square, M = P u, V = P v - M^2. P is a product of two matrices a head,
P_y along the columns of the grid and P_x along its rows::

                                      forward                            backward
    unpooled, up to 16 cells a side   axes, statistics, grid             axes, grid_backward, tokens_backward
    otherwise                         axes, statistics, rows, columns    axes, statistics (pooled), rows,
                                                                         columns_backward, rows_backward,
                                                                         tokens_backward

Every kernel takes ``m``, the memory of a call; the size of images, for which it is not compiled again; and ``L``, for
which it is. Statistics are float32, whatever the input is. What several programs add to is written by each and added by
one torch sum: without atomics, results do not change from run to run. Programs beside each other read channels beside
each other.
"""

from __future__ import annotations  # where there is no Triton, there is no tl.constexpr either

import warnings
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from mmengine.dist import all_reduce, is_distributed
from torch import Tensor

from . import reference
from .interface import Kept, Settings, Tensors

try:
    import triton
    import triton.language as tl
    from triton import jit
except ImportError:  # Windows and macOS
    triton = None

    def jit(**_: Any) -> Callable[[Callable], Callable]:
        return lambda function: function


DEVICE = 'cuda'
SMALL = 16  # cells a side of the grids that one program takes whole
SIZES = ['H', 'W']

# Values in kernels
Pair = namedtuple('Pair', 'u v')  # of cells: what P averages, what it makes of them, or gradients of either
Axis = namedtuple('Axis', 'P moments n stride')  # P_y or P_x of one head, of n x n cells
Chunk = namedtuple('Chunk', 'head channel real shift mean_lambda var_lambda')  # some channels of one head of an image
Normalised = namedtuple('Normalised', 'at mask value inverse mean var')  # tokens of a chunk; mean is less the shift


class Layer(NamedTuple):
    """What kernels are compiled for."""

    C: int
    K: int
    c: int  # channels of a head
    width: int  # a power of 2 from c on, for programs that take
    tile: int  # so many tokens or cells, all channels
    lanes: int  # For programs that take some channels of one head: how many,
    blocks: int  # how many such blocks all heads have,
    parts: int  # and a power of 2 from that on.
    tf32x3: bool  # AMD has none
    s: Settings


class Memory(NamedTuple):
    """What kernels of both directions read and write. Pairs are two maps of cells, B x h x w x C each."""

    t: Tensors
    kept: Kept
    P: Tensor  # K x (h + w) x stride: of each head the rows of P_y, and those of P_x
    moments: Tensor  # K x (h + w) x 3, for the slopes of P
    cells: Pair  # means and variances of cells; unpooled the tokens
    rows: Pair | None  # P_x of u and v; going back, gradients of these


class Gradients(NamedTuple):
    """What else the backward pass needs."""

    of_y: Tensor
    of_uv: Pair  # unpooled, and in the end, of z
    of_tokens: Tensor  # B x H x W x blocks x 2: parts of the gradients of a token's mean and variance
    parts: Tensors  # the gradient of x, and parts of those of the parameters
    M_V: Pair | None  # M and V, pooled, for the second pass over tokens
    column: Pair | None  # of more than 16 cells, for each program


@jit()
def _axis(m, head, axis, h, w):
    row, stride = head.to(tl.int64) * (h + w) + axis * h, tl.cdiv(tl.maximum(h, w), 16) * 16
    return Axis(m.P + row * stride, m.moments + row * 3, h + axis * (w - h), stride)


@jit(do_not_specialize=SIZES)
def _axes(m, H, W, L, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """P_y and P_x, padded with zeros, and their moments."""
    head, axis = tl.program_id(1), tl.program_id(2)
    to = _axis(m, head, axis, tl.cdiv(H, L.s.pool_size), tl.cdiv(W, L.s.pool_size))
    query = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    key = tl.arange(0, KEYS)[None]
    shift = (key - query).to(tl.float32)
    quadratic, linear = tl.load(m.t.position + 3 * head), tl.load(m.t.position + 3 * head + 2 - axis)
    if L.s.identity:
        top = tl.zeros([ROWS, 1], tl.float32)
        P = tl.where(key == query, 1.0, 0.0)
    else:
        # Relative to the shift where a row is largest, nothing is lost where P is: neither in P nor in its slopes.
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
def _of_position(P, axis, query, key, pair, of, L):
    """What gradients ``of`` the result mean for a_1 and for the axis' own coefficient a.

    dP/da = P (f - P f) with f relative to the row's top. (P's own gradient, a product over channels, would spill
    registers.)
    """
    at = axis.moments + 3 * query
    top = tl.load(at, mask=query < axis.n, other=0.0)[:, None]
    square = tl.load(at + 1, mask=query < axis.n, other=0.0)[:, None]
    linear = tl.load(at + 2, mask=query < axis.n, other=0.0)[:, None]
    shift = (key[None] - query[:, None]).to(tl.float32)
    by_square, by_linear = P * ((shift - top) * (shift + top) - square), P * (shift - top - linear)
    of_square = tl.sum(_dot(by_square, pair.u, L) * of.u)
    of_linear = tl.sum(_dot(by_linear, pair.u, L) * of.u)
    of_square += tl.sum(_dot(by_square, pair.v, L) * of.v)
    of_linear += tl.sum(_dot(by_linear, pair.v, L) * of.v)
    return of_square, of_linear


@jit()
def _load_pair(pair, at, mask):
    return Pair(tl.load(pair.u + at, mask=mask, other=0.0), tl.load(pair.v + at, mask=mask, other=0.0))


@jit()
def _store_pair(pair, at, mask, values):
    tl.store(pair.u + at, values.u, mask=mask)
    tl.store(pair.v + at, values.v, mask=mask)


@jit()
def _zeros(rows: tl.constexpr, lanes: tl.constexpr):
    return Pair(tl.zeros([rows, lanes], tl.float32), tl.zeros([rows, lanes], tl.float32))


@jit()
def _tile(program, n, size: tl.constexpr):
    """The number of a line (or image) of n things, and those of them that a program takes."""
    return (program // tl.cdiv(n, size)).to(tl.int64), program % tl.cdiv(n, size) * size + tl.arange(0, size)


@jit()
def _chunk(m, b, lane, L):
    """This program's block of channels: none of which are of two heads."""
    block = tl.program_id(0) % L.blocks
    head, channel = block // (L.blocks // L.K), block % (L.blocks // L.K) * L.lanes + lane
    real = channel < L.c
    channel += head * L.c
    shift = tl.load(m.kept.of_channels + b * L.C + channel, mask=real, other=0.0)
    return Chunk(head, channel, real, shift, tl.load(m.t.mean_lambda + head), tl.load(m.t.var_lambda + head))


@jit()
def _token(b, y, x, offset, H, W, L):
    """The token ``offset`` of the cell in row y and column x, and whether there is one."""
    row = offset // L.s.pool_size
    y, x = y * L.s.pool_size + row, (x - row) * L.s.pool_size + offset
    return (b * H + y) * W + x, (y < H) & (x < W)


@jit()
def _load_head(m, token, there, head, L):
    """A head's slice of tokens: z, the scale x was multiplied by, and which of it exists."""
    channel = tl.arange(0, L.width)[None]
    mask = there[:, None] & (channel < L.c)
    z = tl.load(m.t.x + token[:, None] * L.C + head * L.c + channel, mask=mask, other=0.0).to(tl.float32)
    scale = tl.zeros_like(token).to(tl.float32) + 1.0
    if L.s.prenorm:
        scale = tl.rsqrt(tl.sum(z * z, 1) / L.c + L.s.eps)
        z = tl.where(mask, z * scale[:, None], 0.0)
    return z, scale, mask


@jit(do_not_specialize=SIZES)
def _statistics(m, shifts, H, W, L):
    """Scales, mean and variance of each token; mean and variance of z in each cell; parts of the shift.

    The backward pass has no ``shifts``, and asks for those of cells alone.
    """
    S: tl.constexpr = L.s.pool_size
    h, w = tl.cdiv(H, S), tl.cdiv(W, S)
    b, cell = _tile(tl.program_id(0), h * w, L.tile)
    lane = tl.arange(0, L.width)
    part = tl.program_id(0).to(tl.int64) * L.C + lane
    if shifts is not None:
        for offset in range(S * S):
            token, there = _token(b, cell // w, cell % w, offset, H, W, L)
            of_token = m.kept.of_tokens + token * (L.K + 2)
            mean = tl.zeros([L.tile], tl.float32)
            squares = tl.zeros([L.tile], tl.float32)
            for k in range(L.K):  # adds each head to those before it as Chan does: exact far from 0 too
                z, scale, mask = _load_head(m, token, there, k, L)
                head_mean = tl.sum(z, 1) / L.c
                deviation = tl.where(mask, z - head_mean[:, None], 0.0)
                change = head_mean - mean
                mean += change / (k + 1)
                squares += tl.sum(deviation * deviation, 1) + change * change * (L.c * k / (k + 1))
                tl.store(of_token + k, scale, mask=there)
                if S == 1:
                    tl.store(shifts + part + k * L.c, tl.sum(z, 0) / (h * w), mask=lane < L.c)
            tl.store(of_token + L.K, mean, mask=there)
            tl.store(of_token + L.K + 1, squares / (L.C - L.s.unbiased), mask=there)
    if S > 1:
        for k in range(L.K):
            first, second = _zeros(L.tile, L.width)
            number = tl.zeros([L.tile, 1], tl.float32)
            for offset in range(S * S):  # adds each token to those before it as Welford does
                token, there = _token(b, cell // w, cell % w, offset, H, W, L)
                z, _, mask = _load_head(m, token, there, k, L)
                number += tl.where(there, 1.0, 0.0)[:, None]
                change = tl.where(mask, z - first, 0.0)
                first += change / tl.maximum(number, 1.0)
                second += change * tl.where(mask, z - first, 0.0)
            at = (b * h * w + cell[:, None]) * L.C + k * L.c + lane[None]
            mask = (cell < h * w)[:, None] & (lane < L.c)[None]
            tl.store(m.cells.u + at, first, mask=mask)
            if L.s.pool_second_moment:
                tl.store(m.cells.v + at, second / tl.maximum(number, 1.0), mask=mask)
            if shifts is not None:
                tl.store(shifts + part + k * L.c, tl.sum(first, 0) / (h * w), mask=lane < L.c)


@jit()
def _load_cells(cells, of_tokens, cell, there, chunk, L):
    """u and v."""
    mask = there & chunk.real
    z = tl.load(cells.u + cell * L.C + chunk.channel, mask=mask, other=0.0).to(tl.float32)
    if L.s.pool_size == 1:
        z *= tl.load(of_tokens + cell * (L.K + 2) + chunk.head, mask=mask, other=0.0)
    u = tl.where(mask, z - chunk.shift, 0.0)
    v = u * u
    if L.s.pool_size > 1 and L.s.pool_second_moment:
        v += tl.load(cells.v + cell * L.C + chunk.channel, mask=mask, other=0.0)
    return Pair(u, v)


@jit()
def _normalise(x, of_tokens, token, there, M, V, chunk, L):
    mask = there & chunk.real
    at, of_token = token * L.C + chunk.channel, of_tokens + token * (L.K + 2)
    mean = tl.load(of_token + L.K, mask=mask, other=0.0) - chunk.shift
    var = tl.load(of_token + L.K + 1, mask=mask, other=1.0)
    l, k = chunk.mean_lambda, chunk.var_lambda
    inverse = tl.rsqrt(k * var + (1 - k) * tl.maximum(V, 0.0) + L.s.eps)
    z = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    u = z * tl.load(of_token + chunk.head, mask=mask, other=0.0) - chunk.shift
    return Normalised(at, mask, (u - l * mean - (1 - l) * M) * inverse, inverse, mean, var)


@jit()
def _store_output(m, y, n, chunk):
    weight = tl.load(m.t.weight + chunk.channel, mask=chunk.real)
    bias = tl.load(m.t.bias + chunk.channel, mask=chunk.real)
    tl.store(y + n.at, n.value * weight + bias, mask=n.mask)


@jit()
def _differentiate(grad, weight, n):
    """Gradients of the output, of -mu and of the variance."""
    of_y = tl.load(grad + n.at, mask=n.mask, other=0.0).to(tl.float32)
    d = tl.where(n.mask, of_y * weight * n.inverse, 0.0)
    return of_y, d, tl.where(n.mask, -0.5 * d * n.value * n.inverse, 0.0)


@jit(do_not_specialize=SIZES)
def _rows(m, H, W, L):
    """P_x u and P_x v, for 32 cells of a row."""
    h, w = tl.cdiv(H, L.s.pool_size), tl.cdiv(W, L.s.pool_size)
    row, query = _tile(tl.program_id(0) // L.blocks, w, 32)
    chunk = _chunk(m, row // h, tl.arange(0, L.lanes)[None], L)
    P_x = _axis(m, chunk.head, 1, h, w)
    U, V = _zeros(32, L.lanes)
    for start in range(0, w, 16):
        key = start + tl.arange(0, 16)
        uv = _load_cells(m.cells, m.kept.of_tokens, row * w + key[:, None], (key < w)[:, None], chunk, L)
        part = _apply(_load_P(P_x, query, key), uv, L)
        U += part.u
        V += part.v
    at = (row * w + query[:, None]) * L.C + chunk.channel
    _store_pair(m.rows, at, (query < w)[:, None] & chunk.real, Pair(U, V))


@jit()
def _moments(rows, P_y, first, w, query, chunk, L):
    """M and V of some cells of the column that begins at cell ``first``, from what ``_rows`` wrote."""
    M, V = _zeros(query.shape[0], L.lanes)
    for start in range(0, P_y.n, 16):
        key = start + tl.arange(0, 16)
        at = (first + key[:, None] * w) * L.C + chunk.channel
        part = _apply(_load_P(P_y, query, key), _load_pair(rows, at, (key < P_y.n)[:, None] & chunk.real), L)
        M += part.u
        V += part.v
    return M, V - M * M


@jit(do_not_specialize=SIZES)
def _columns(m, y, H, W, L):
    """P_y of what ``_rows`` wrote, for 32 cells of a column, and their tokens normalised."""
    h, w = tl.cdiv(H, L.s.pool_size), tl.cdiv(W, L.s.pool_size)
    column, query = _tile(tl.program_id(0) // L.blocks, h, 32)
    b, x = column // w, column % w
    chunk = _chunk(m, b, tl.arange(0, L.lanes)[None], L)
    M, V = _moments(m.rows, _axis(m, chunk.head, 0, h, w), b * h * w + x, w, query, chunk, L)
    for offset in range(L.s.pool_size * L.s.pool_size):
        token, there = _token(b, query[:, None], x, offset, H, W, L)
        _store_output(m, y, _normalise(m.t.x, m.kept.of_tokens, token, there, M, V, chunk, L), chunk)


@jit(do_not_specialize=SIZES)
def _columns_backward(m, g, H, W, L):
    """Replaces what ``_rows`` wrote by P_y^T of the gradients of M and V; parts of the parameters' gradients.

    Keeps M and V, or unpooled the gradient of -mu, a part of that of z. A program takes one column after the other, and
    adds up those of more than 16 cells in memory of its own.
    """
    h, w = tl.cdiv(H, L.s.pool_size), tl.cdiv(W, L.s.pool_size)
    block, b = tl.program_id(0) % L.blocks, (tl.program_id(0) // L.blocks).to(tl.int64)
    lane = tl.arange(0, L.lanes)[None]
    chunk = _chunk(m, b, lane, L)
    P_y = _axis(m, chunk.head, 0, h, w)
    weight = tl.load(m.t.weight + chunk.channel, mask=chunk.real, other=0.0)
    program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    of_weight, of_bias = _zeros(1, L.lanes)
    of_l, of_k, of_square, of_linear = 0.0, 0.0, 0.0, 0.0
    for x in range(tl.program_id(1), w, tl.num_programs(1)):
        first = b * h * w + x
        for begin in range(0, h, 16):
            query = begin + tl.arange(0, 16)
            M, V = _moments(m.rows, P_y, first, w, query, chunk, L)
            dM, dV = _zeros(16, L.lanes)
            for offset in range(L.s.pool_size * L.s.pool_size):
                token, there = _token(b, query[:, None], x, offset, H, W, L)
                n = _normalise(m.t.x, m.kept.of_tokens, token, there, M, V, chunk, L)
                of_y, d, e = _differentiate(g.of_y, weight, n)
                of_weight += tl.sum(tl.where(n.mask, of_y * n.value, 0.0), 0)[None]
                of_bias += tl.sum(of_y, 0)[None]
                of_l += tl.sum(d * (M - n.mean))
                of_k += tl.sum(e * (n.var - tl.maximum(V, 0.0)))
                dM -= (1 - chunk.mean_lambda) * d
                dV += (1 - chunk.var_lambda) * e
                of_token = g.of_tokens + (token * L.blocks + block) * 2
                tl.store(of_token, chunk.mean_lambda * tl.sum(d, 1)[:, None], mask=there)
                tl.store(of_token + 1, chunk.var_lambda * tl.sum(e, 1)[:, None], mask=there)
                if L.s.pool_size == 1:
                    tl.store(g.of_uv.u + n.at, d, mask=n.mask)
            if L.s.pool_size > 1:
                at = (first + query[:, None] * w) * L.C + chunk.channel
                _store_pair(g.M_V, at, (query < h)[:, None] & chunk.real, Pair(M, V))
            of_moments = Pair(dM - 2 * M * dV, dV)
            for start in range(0, h, 16):
                key = start + tl.arange(0, 16)
                mask = (key < h)[:, None] & chunk.real
                at = (first + key[:, None] * w) * L.C + chunk.channel
                P = _load_P(P_y, query, key)
                square, linear = _of_position(P, P_y, query, key, _load_pair(m.rows, at, mask), of_moments, L)
                of_square += square
                of_linear += linear
                of_rows = _apply(tl.trans(P), of_moments, L)
                own = (program * h + key[:, None]) * L.lanes + lane
                if begin > 0:
                    before = _load_pair(g.column, own, mask)
                    of_rows = Pair(of_rows.u + before.u, of_rows.v + before.v)
                tl.debug_barrier()  # all threads have read what is written now
                if begin + 16 < h:
                    _store_pair(g.column, own, mask, of_rows)
                else:
                    _store_pair(m.rows, at, mask, of_rows)
            tl.debug_barrier()
    part = b * tl.num_programs(1) + tl.program_id(1)
    tl.store(g.parts.weight + part * L.C + chunk.channel, of_weight, mask=chunk.real)
    tl.store(g.parts.bias + part * L.C + chunk.channel, of_bias, mask=chunk.real)
    part = part * L.blocks + block
    tl.store(g.parts.mean_lambda + part, of_l)
    tl.store(g.parts.var_lambda + part, of_k)
    tl.store(g.parts.position + 4 * part, of_square)
    tl.store(g.parts.position + 4 * part + 1, 0.0)
    tl.store(g.parts.position + 4 * part + 2, of_linear)


@jit(do_not_specialize=SIZES)
def _rows_backward(m, g, H, W, L):
    """P_x^T of what ``_columns_backward`` wrote, the gradients of u and v; unpooled, as part of the gradient of z."""
    h, w = tl.cdiv(H, L.s.pool_size), tl.cdiv(W, L.s.pool_size)
    row, key = _tile(tl.program_id(0) // L.blocks, w, 16)
    chunk = _chunk(m, row // h, tl.arange(0, L.lanes)[None], L)
    P_x = _axis(m, chunk.head, 1, h, w)
    uv = _load_cells(m.cells, m.kept.of_tokens, row * w + key[:, None], (key < w)[:, None], chunk, L)
    of_u, of_v = _zeros(16, L.lanes)
    of_square, of_linear = 0.0, 0.0
    for start in range(0, w, 32):
        query = start + tl.arange(0, 32)
        at = (row * w + query[:, None]) * L.C + chunk.channel
        of_rows = _load_pair(m.rows, at, (query < w)[:, None] & chunk.real)
        P = _load_P(P_x, query, key)
        square, linear = _of_position(P, P_x, query, key, uv, of_rows, L)
        of_square += square
        of_linear += linear
        part = _apply(tl.trans(P), of_rows, L)
        of_u += part.u
        of_v += part.v
    of_position = g.parts.position + tl.program_id(0).to(tl.int64) * 4
    tl.store(of_position, of_square)
    tl.store(of_position + 1, of_linear)
    tl.store(of_position + 2, 0.0)
    at, mask = (row * w + key[:, None]) * L.C + chunk.channel, (key < w)[:, None] & chunk.real
    if L.s.pool_size == 1 or not L.s.pool_second_moment:
        of_u += 2 * uv.u * of_v
    if L.s.pool_size == 1:
        of_u += tl.load(g.of_uv.u + at, mask=mask, other=0.0)
    tl.store(g.of_uv.u + at, of_u, mask=mask)
    if L.s.pool_size > 1 and L.s.pool_second_moment:
        tl.store(g.of_uv.v + at, of_v, mask=mask)


@jit()
def _swap(tile, L):
    """y x (x, lanes) to x x (y, lanes), and back."""
    return tl.permute(tile.reshape(16, 16, L.lanes), (1, 0, 2)).reshape(16, 16 * L.lanes)


@jit()
def _swap_pair(pair, L):
    return Pair(_swap(pair.u, L), _swap(pair.v, L))


@jit()
def _grid_rows(x, of_tokens, P_x, chunk, H, W, L):
    """Of an image u and v, x x (y, lanes), P along x, and what that makes of them."""
    side, y = tl.arange(0, 16), tl.arange(0, 16 * L.lanes)[None] // L.lanes
    uv = _load_cells(Pair(x, x), of_tokens, y * W + side[:, None], (y < H) & (side < W)[:, None], chunk, L)
    P = _load_P(P_x, side, side)
    return uv, P, _apply(P, uv, L)


@jit()
def _grid_tokens(x, of_tokens, P_y, P_x, chunk, H, W, L):
    """M and V of an image, y x (x, lanes), and its tokens normalised."""
    side, at_x = tl.arange(0, 16), tl.arange(0, 16 * L.lanes)[None] // L.lanes
    _, _, rows = _grid_rows(x, of_tokens, P_x, chunk, H, W, L)
    M, V = _apply(_load_P(P_y, side, side), _swap_pair(rows, L), L)
    V -= M * M
    y = side[:, None]
    return M, V, _normalise(x, of_tokens, y * W + at_x, (y < H) & (at_x < W), M, V, chunk, L)


@jit(do_not_specialize=SIZES)
def _grid(m, y, H, W, L):
    """P along both axes, and the tokens normalised: some channels of one head of an image of up to 16 x 16 cells."""
    b = (tl.program_id(0) // L.blocks).to(tl.int64)
    chunk = _chunk(m, b, tl.arange(0, 16 * L.lanes)[None] % L.lanes, L)  # for each of 16 cells side by side
    P_y, P_x = _axis(m, chunk.head, 0, H, W), _axis(m, chunk.head, 1, H, W)
    x, of_tokens = m.t.x + b * H * W * L.C, m.kept.of_tokens + b * H * W * (L.K + 2)
    _, _, n = _grid_tokens(x, of_tokens, P_y, P_x, chunk, H, W, L)
    _store_output(m, y + b * H * W * L.C, n, chunk)


@jit(do_not_specialize=SIZES)
def _grid_backward(m, g, H, W, L):
    """The gradient of z but for the token's own statistics, what those need, and parts of the parameters' gradients."""
    block, b = tl.program_id(0) % L.blocks, (tl.program_id(0) // L.blocks).to(tl.int64)
    side, along = tl.arange(0, 16), tl.arange(0, 16 * L.lanes)[None] // L.lanes
    y = side[:, None]
    chunk = _chunk(m, b, tl.arange(0, 16 * L.lanes)[None] % L.lanes, L)
    P_y, P_x = _axis(m, chunk.head, 0, H, W), _axis(m, chunk.head, 1, H, W)
    x, of_tokens = m.t.x + b * H * W * L.C, m.kept.of_tokens + b * H * W * (L.K + 2)
    M, V, n = _grid_tokens(x, of_tokens, P_y, P_x, chunk, H, W, L)
    weight = tl.load(m.t.weight + chunk.channel, mask=chunk.real, other=0.0)
    of_y, d, e = _differentiate(g.of_y + b * H * W * L.C, weight, n)
    part = tl.program_id(0).to(tl.int64)
    tl.store(g.parts.mean_lambda + part, tl.sum(d * (M - n.mean)))
    tl.store(g.parts.var_lambda + part, tl.sum(e * (n.var - tl.maximum(V, 0.0))))
    own = _chunk(m, b, tl.arange(0, L.lanes), L)
    of_weight = tl.sum(tl.where(n.mask, of_y * n.value, 0.0), 0)
    tl.store(g.parts.weight + b * L.C + own.channel, tl.sum(of_weight.reshape(16, L.lanes), 0), mask=own.real)
    tl.store(g.parts.bias + b * L.C + own.channel, tl.sum(tl.sum(of_y, 0).reshape(16, L.lanes), 0), mask=own.real)
    of_token = g.of_tokens + b * H * W * L.blocks * 2 + ((y * W + side[None]) * L.blocks + block) * 2
    there = (y < H) & (side < W)[None]
    tl.store(of_token, chunk.mean_lambda * tl.sum(d.reshape(16, 16, L.lanes), 2), mask=there)
    tl.store(of_token + 1, chunk.var_lambda * tl.sum(e.reshape(16, 16, L.lanes), 2), mask=there)
    dV = (1 - chunk.var_lambda) * e
    of_moments = Pair(-(1 - chunk.mean_lambda) * d - 2 * M * dV, dV)
    # Rows and P are loaded again, here and below: kept, they would spill registers. Without a store in between the
    # compiler keeps them.
    _, _, rows = _grid_rows(x, of_tokens, P_x, chunk, H, W, L)
    P = _load_P(P_y, side, side)
    of_square, of_vertical = _of_position(P, P_y, side, side, _swap_pair(rows, L), of_moments, L)
    tl.store(g.parts.position + 4 * part + 2, of_vertical)
    of_rows = _swap_pair(_apply(tl.trans(P), of_moments, L), L)
    uv, P, _ = _grid_rows(x, of_tokens, P_x, chunk, H, W, L)
    square, of_horizontal = _of_position(P, P_x, side, side, uv, of_rows, L)
    tl.store(g.parts.position + 4 * part, of_square + square)
    tl.store(g.parts.position + 4 * part + 1, of_horizontal)
    of_u, of_v = _apply(tl.trans(P), of_rows, L)
    at = (along * W + y) * L.C + chunk.channel  # here rows are x, and lanes are y
    tl.store(
        g.of_uv.u + b * H * W * L.C + at, _swap(d, L) + of_u + 2 * uv.u * of_v, mask=(along < H) & (y < W) & chunk.real
    )


@jit(do_not_specialize=SIZES)
def _tokens_backward(m, g, H, W, L):
    """The gradient of x: through the cell of a token, the token's own statistics and its root mean squares."""
    S: tl.constexpr = L.s.pool_size
    b, token = _tile(tl.program_id(0), H * W, L.tile)
    there = token < H * W
    y, x = token // W, token % W
    number = tl.minimum(H - y // S * S, S) * tl.minimum(W - x // S * S, S)
    share = 1 / number.to(tl.float32)[:, None]
    cell = ((b * tl.cdiv(H, S) + y // S) * tl.cdiv(W, S) + x // S)[:, None]
    token = (b * H * W + token)[:, None]
    there = there[:, None]
    of_token = m.kept.of_tokens + token * (L.K + 2)
    part = tl.arange(0, L.parts)[None]
    parts, counted = g.of_tokens + (token * L.blocks + part) * 2, there & (part < L.blocks)
    of_mean = tl.sum(tl.load(parts, mask=counted, other=0.0), 1)[:, None] / L.C
    of_var = tl.sum(tl.load(parts + 1, mask=counted, other=0.0), 1)[:, None] * (2 / (L.C - L.s.unbiased))
    mean = tl.load(of_token + L.K, mask=there, other=0.0)
    real = (tl.arange(0, L.width) < L.c)[None]
    mask = there & real
    for k in range(L.K):
        channel = k * L.c + tl.arange(0, L.width)[None]
        at = token * L.C + channel
        scale = tl.load(of_token + k, mask=there, other=0.0)
        z = tl.load(m.t.x + at, mask=mask, other=0.0).to(tl.float32) * scale
        if S == 1:
            of_z = tl.load(g.of_uv.u + at, mask=mask, other=0.0)
        else:
            shift = tl.load(m.kept.of_channels + b * L.C + channel, mask=real, other=0.0)
            chunk = Chunk(k, channel, real, shift, tl.load(m.t.mean_lambda + k), tl.load(m.t.var_lambda + k))
            M, V = _load_pair(g.M_V, cell * L.C + channel, mask)
            n = _normalise(m.t.x, m.kept.of_tokens, token, there, M, V, chunk, L)
            _, of_z, _ = _differentiate(g.of_y, tl.load(m.t.weight + channel, mask=real, other=0.0), n)
            of_z += tl.load(g.of_uv.u + cell * L.C + channel, mask=mask, other=0.0) * share
            if L.s.pool_second_moment:
                of_v = tl.load(g.of_uv.v + cell * L.C + channel, mask=mask, other=0.0)
                of_z += 2 * (z - shift) * of_v * share
        of_z += of_var * (z - mean) - of_mean
        if L.s.prenorm:
            of_z = tl.where(mask, of_z, 0.0)
            of_z = scale * (of_z - z * (tl.sum(of_z * z, 1) / L.c)[:, None])
        tl.store(g.parts.x + at, of_z, mask=mask)


class _Call:
    """The sizes of a call, its memory, and how kernels are launched."""

    def __init__(self, t: Tensors, s: Settings) -> None:
        self.x, self.s, (self.B, self.H, self.W, C) = t.x, s, t.x.shape
        self.h, self.w = (-(-side // s.pool_size) for side in (self.H, self.W))
        self.small = s.pool_size == 1 and max(self.h, self.w) <= SMALL
        K = len(t.position)
        width = triton.next_power_of_2(C // K)
        tile, lanes = max(1, min(64, 2048 // width)), 16 if self.small else min(max(width, 32), 64)
        blocks = K * triton.cdiv(C // K, lanes)
        parts = triton.next_power_of_2(blocks)
        self.L = Layer(C, K, C // K, width, tile, lanes, blocks, parts, tf32x3=not torch.version.hip, s=s)

    def empty(self, *shape: int) -> Tensor:
        return self.x.new_empty(shape, dtype=torch.float32)

    def maps(self, number: int = 2) -> Pair:
        maps = self.empty(number, self.B, self.h, self.w, self.L.C)
        return Pair(maps[0], maps[-1])

    def memory(self, t: Tensors, kept: Kept) -> Memory:
        """With P in it."""
        L, s, longest = self.L, self.s, max(self.h, self.w)
        stride = triton.cdiv(longest, 16) * 16
        P, moments = (self.empty(L.K, self.h + self.w, n) for n in (stride, 3))
        cells = Pair(t.x, t.x) if s.pool_size == 1 else self.maps(1 + s.pool_second_moment)
        m = Memory(t, kept, P, moments, cells, None if self.small else self.maps())
        keys = triton.next_power_of_2(stride)
        rows = max(1, min(16, 2048 // keys))
        self.launch(_axes, (triton.cdiv(longest, rows), L.K, 2), m, ROWS=rows, KEYS=keys)
        return m

    def launch(self, kernel: Any, grid: tuple[int, ...], *memory: Any, **options: int) -> None:
        kernel[grid](*memory, self.H, self.W, _constants(self.L), **options)

    def by_tiles(self, kernel: Any, items: int, *memory: Any) -> None:
        """Programs for all channels of so many tokens or cells of each image."""
        programs = self.B * triton.cdiv(items, self.L.tile)
        self.launch(kernel, (programs,), *memory, num_warps=4 if self.L.width <= 1024 else 8)

    def by_blocks(self, kernel: Any, programs: int, *memory: Any, columns: int = 1) -> None:
        """So many programs for each block of channels. The numbers of warps are such that no registers spill."""
        warps = 8 if self.small or self.L.lanes == 64 else 4
        self.launch(kernel, (programs * self.L.blocks, columns), *memory, num_warps=warps)


def _constants(values: Any) -> Any:
    """A tuple for Triton, of values that it compiles for."""
    return type(values)(*(_constants(value) if isinstance(value, tuple) else tl.constexpr(value) for value in values))


def forward(t: Tensors, s: Settings, dtype: torch.dtype) -> tuple[Tensor, Kept]:
    with torch.cuda.device_of(t.x):
        call = _Call(t, s)
        B, h, w, L = call.B, call.h, call.w, call.L
        y, of_tokens = torch.empty_like(t.x, dtype=dtype), call.empty(B * call.H * call.W * (L.K + 2))
        shifts = call.empty(B, triton.cdiv(h * w, L.tile), L.C)
        m = call.memory(t, Kept(of_tokens, shifts))
        call.by_tiles(_statistics, h * w, m, shifts)
        m = m._replace(kept=Kept(of_tokens, shifts.sum(1)))
        if call.small:
            call.by_blocks(_grid, B, m, y)
        else:
            call.by_blocks(_rows, B * h * triton.cdiv(w, 32), m)
            call.by_blocks(_columns, B * w * triton.cdiv(h, 32), m, y)
    return y, m.kept


def backward(grad: Tensor, t: Tensors, kept: Kept, s: Settings) -> Tensors:
    """From the gradient of the output, and what ``forward`` kept, those of x and of the parameters."""
    with torch.cuda.device_of(t.x):
        call = _Call(t, s)
        B, h, w, L, pooled = call.B, call.h, call.w, call.L, s.pool_size > 1
        # Programs for the columns of an image: one for each, or, where they need memory of their own, not too many.
        columns = 1 if call.small else w if h <= 16 else min(triton.cdiv(w, 4), triton.cdiv(512, B * L.blocks))
        parts, rows = B * columns, 0 if call.small else B * h * triton.cdiv(w, 16)
        m, heads = call.memory(t, kept), (L.K, L.blocks // L.K)
        g = Gradients(
            of_y=grad,
            of_uv=call.maps(1 + (pooled and s.pool_second_moment)),
            of_tokens=call.empty(B * call.H * call.W, L.blocks, 2),
            parts=Tensors(
                x=torch.empty_like(t.x),
                weight=call.empty(parts, L.C),
                bias=call.empty(parts, L.C),
                mean_lambda=call.empty(parts, *heads),
                var_lambda=call.empty(parts, *heads),
                position=call.empty(parts + rows, *heads, 4),  # 4, not 3: aligned wherever the rows start
            ),
            M_V=call.maps() if pooled else None,
            column=Pair(*call.empty(2, parts * L.blocks, h, L.lanes)) if h > 16 else None,
        )
        if pooled:
            call.by_tiles(_statistics, h * w, m, None)
        if call.small:
            call.by_blocks(_grid_backward, B, m, g)
        else:
            call.by_blocks(_rows, B * h * triton.cdiv(w, 32), m)
            call.by_blocks(_columns_backward, B, m, g, columns=columns)
            of_rows = g.parts._replace(position=g.parts.position[parts:])
            call.by_blocks(_rows_backward, rows, m, g._replace(parts=of_rows))
        call.by_tiles(_tokens_backward, call.H * call.W, m, g)
        x, weight, bias, l, k, position = g.parts
        return Tensors(x, weight.sum(0), bias.sum(0), l.sum((0, 2)), k.sum((0, 2)), position[..., :3].sum((0, 2)))


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
        if device.type == DEVICE and _must_wait():
            return True
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


def _must_wait() -> bool:
    """Whether nothing can be computed and looked at now."""
    return torch.compiler.is_compiling() or not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing()


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
            t = Tensors(x, weight, bias, l, m, torch.randn(K, 3, generator=generator).to(device) / 4)
            try:
                y, kept = forward(t, s, dtype)
                gradients = backward(grad, t, kept, s)
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as error:  # a compiler raises anything
                return f'{case}: {type(error).__name__}: {error}'
            exact = Tensors(*(tensor.double() for tensor in t))
            expected, pull_back, *_ = torch.func.vjp(partial(reference.dtn, s=s), exact)
            pairs = zip((y, *gradients), (expected, *pull_back(grad.double())[0]), strict=True)
            for name, (ours, right) in zip(
                ('output', *(f'gradient of {name}' for name in t._fields)), pairs, strict=True
            ):
                difference = ((ours.double() - right).norm() / right.norm()).item()
                limit = forward_tolerance if name == 'output' else backward_tolerance
                if not difference <= limit:
                    return f'{case}: {name} differs from the reference by {difference:.1e}, more than {limit:.0e}'
    return None
