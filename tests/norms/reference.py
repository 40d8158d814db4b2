"""DTN written straight from its equations: dense P, cells by loops. Slow on purpose, and shares no code with mmdtn."""

import torch


def cells_of(length, side):
    return [range(start, min(start + side, length)) for start in range(0, length, side)]


def dense_p(position, h, w):
    """``K x (h w) x (h w)``: softmax_j(a_1 (dx^2 + dy^2) + a_2 dx + a_3 dy), (dx, dy) from query i to key j."""
    y, x = (t.flatten().to(position.dtype) for t in torch.meshgrid(torch.arange(h), torch.arange(w), indexing='ij'))
    dx, dy = x[None, :] - x[:, None], y[None, :] - y[:, None]
    a1, a2, a3 = (position[:, i, None, None] for i in range(3))
    return (a1 * (dx**2 + dy**2) + a2 * dx + a3 * dy).softmax(-1)


def reference_dtn(x, layer):
    """What ``layer``, a DTN, should give for ``x``, ``B x H x W x C``, read off its parameters and settings."""
    B, H, W, C = x.shape
    s = layer.settings
    K, c, side = layer.num_heads, C // layer.num_heads, layer.pool_size
    heads = x.reshape(B, H, W, K, c)
    if s.prenorm:
        heads = heads / (heads.pow(2).mean(-1, keepdim=True) + s.eps).sqrt()
    z = heads.reshape(B, H, W, C)

    rows, columns = cells_of(H, side), cells_of(W, side)
    first, second = [], []
    for ys in rows:
        for xs in columns:
            inside = z[:, ys.start : ys.stop, xs.start : xs.stop].reshape(B, -1, C)
            first.append(inside.mean(1))
            second.append(inside.pow(2).mean(1) if s.pool_second_moment else inside.mean(1).pow(2))
    h, w = len(rows), len(columns)
    first, second = (torch.stack(t, 1).reshape(B, h * w, K, c) for t in (first, second))
    if s.identity:
        P = torch.eye(h * w, dtype=x.dtype).expand(K, -1, -1)
    else:
        P = dense_p(torch.zeros(K, 3, dtype=x.dtype) if layer.position is None else layer.position, h, w)

    out = torch.empty_like(z)
    lambdas = []
    for mix, fixed in ((layer.mean_mix, layer.mean_lambda), (layer.var_mix, layer.var_lambda)):
        lambdas.append(torch.full((K,), fixed, dtype=x.dtype) if mix is None else 1 / (1 + torch.exp(-mix)))
    mean, var = z.mean(-1, keepdim=True), z.var(-1, keepdim=True, unbiased=s.unbiased)
    weight = torch.ones(C, dtype=x.dtype) if layer.weight is None else layer.weight
    bias = torch.zeros(C, dtype=x.dtype) if layer.bias is None else layer.bias
    for k in range(K):
        at = slice(k * c, (k + 1) * c)
        M = P[k] @ first[:, :, k]
        V = (P[k] @ second[:, :, k] - M**2).clamp(min=0)
        up = torch.tensor([(y // side) * w + x // side for y in range(H) for x in range(W)])
        mu = lambdas[0][k] * mean + (1 - lambdas[0][k]) * M[:, up].reshape(B, H, W, c)
        sigma2 = lambdas[1][k] * var + (1 - lambdas[1][k]) * V[:, up].reshape(B, H, W, c)
        out[..., at] = (z[..., at] - mu) / (sigma2 + s.eps).sqrt() * weight[at] + bias[at]
    return out
