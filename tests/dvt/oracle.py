"""Second implementation of DVT, written from the text of the paper, with the names in published files.

The implementation shares no code with the package. Its matrices of all pairs of tokens make it slow.
"""

import math
from fractions import Fraction

import torch

SPLITS = dict(less_less_token=(14, 8, 3), less_token=(11, 6, 5), normal_token=(7, 4, 2))
PATCHES = dict(less_less_token=(32, 0), less_token=(23, 3), normal_token=(16, 0))


def cascade(state, images, heads):
    """Returns the logits of each exit."""
    out, tokens, logits = [], None, None
    for prefix in SPLITS:
        own = {key[len(prefix) + 1 :]: value for key, value in state.items() if key.startswith(f'{prefix}.')}
        scores, tokens, logits = classify(own, images, heads, prefix, tokens, logits)
        out.append(scores)
    return out


def classify(w, images, heads, prefix, upstream, relations):
    t2t = 'tokens_to_token.project.weight' in w
    eps = 1e-5 if t2t else 1e-6
    x = soft_splits(w, images, SPLITS[prefix]) if t2t else patches(w, images, *PATCHES[prefix])
    x = torch.cat((w['cls_token'].expand(len(x), -1, -1), x), 1) + w['pos_embed']
    grid = math.isqrt(x.shape[1] - 1)
    depth = 1 + max(int(key.split('.')[1]) for key in w if key.startswith('blocks.'))
    if upstream is not None:
        U = averages(math.isqrt(upstream.shape[1] - 1), grid)
        T = torch.block_diag(torch.ones(1, 1), torch.kron(U, U))
    added = torch.zeros(())
    if 'relation_reuse_conv.0.weight' in w:
        h = gelu(mix(torch.cat(relations, 1), w, 'relation_reuse_conv.0'))
        added = T @ mix(h, w, 'relation_reuse_conv.2') @ T.T
    all_logits = []
    for i in range(depth):
        b = {key.split('.', 2)[2]: value for key, value in w.items() if key.startswith(f'blocks.{i}.')}
        q, k, v = linear(norm(x, b, 'norm1', eps), b, 'attn.qkv').split(x.shape[2], -1)
        size = x.shape[2] // heads
        joined = []
        own = []
        for head in range(heads):
            at = slice(head * size, (head + 1) * size)
            logits = q[..., at] @ k[..., at].transpose(1, 2) / math.sqrt(size)
            if added.dim():
                logits = logits + added[:, i * heads + head]
            own.append(logits)
            weights = (logits - logits.amax(-1, keepdim=True)).exp()
            joined.append(weights / weights.sum(-1, keepdim=True) @ v[..., at])
        all_logits.append(torch.stack(own, 1))
        x = x + linear(torch.cat(joined, -1), b, 'attn.proj')
        y = x
        if 'feature_resuse_mlp.0.weight' in b:
            g = gelu(linear(norm(upstream, b, 'feature_resuse_mlp.0', eps), b, 'feature_resuse_mlp.1.fc1'))
            e = T @ linear(g, b, 'feature_resuse_mlp.1.fc2')
            e[:, 0] = 0
            y = torch.cat((x, e), -1)
        x = x + linear(gelu(linear(norm(y, b, 'norm2', eps), b, 'mlp.fc1')), b, 'mlp.fc2')
    return linear(norm(x, w, 'norm', eps)[:, 0], w, 'head'), x, all_logits


def averages(s, t):
    """Returns U, whose row i averages the fine cells, half a coarse cell wide, that coarse cell i of t meets."""
    U = torch.zeros(t, s)
    for i in range(t):
        fine = range(math.floor(Fraction(2 * s * i, t)), math.ceil(Fraction(2 * s * (i + 1), t)))
        for j in fine:
            U[i, j // 2] += 1 / len(fine)
    return U


def patches(w, images, kernel, padding):
    padded = torch.nn.functional.pad(images, [padding] * 4)
    n = padded.shape[-1] // kernel
    cut = padded[..., : n * kernel, : n * kernel].unflatten(3, (n, kernel)).unflatten(2, (n, kernel))
    cut = cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    weight = w['patch_embed.proj.weight'].flatten(1)
    return cut @ weight.T + w['patch_embed.proj.bias']


def soft_splits(w, images, first):
    x = images
    for number, (kernel, stride, padding) in enumerate((first, (3, 2, 1), (3, 2, 1)), 1):
        tokens = unfold(x, kernel, stride, padding)
        if number == 3:
            return linear(tokens, w, 'tokens_to_token.project')
        layer = {key.split('.', 2)[2]: v for key, v in w.items() if f'tokens_to_token.attention{number}.' in key}
        tokens = performer(layer, tokens)
        side = math.isqrt(tokens.shape[1])
        x = tokens.transpose(1, 2).unflatten(2, (side, side))


def unfold(x, kernel, stride, padding):
    x = torch.nn.functional.pad(x, [padding] * 4)
    places = range(0, x.shape[-1] - kernel + 1, stride)
    return torch.stack([x[:, :, i : i + kernel, j : j + kernel].flatten(1) for i in places for j in places], 1)


def performer(w, u):
    k, q, v = linear(norm(u, w, 'norm1', 1e-5), w, 'kqv').split(64, -1)
    k, q = ((z @ w['w'].T - z.pow(2).sum(-1, keepdim=True) / 2).exp() / math.sqrt(32) for z in (k, q))
    pairs = q @ k.transpose(1, 2)
    o = v + linear(pairs @ v / (pairs.sum(-1, keepdim=True) + 1e-8), w, 'proj')
    return o + linear(gelu(linear(norm(o, w, 'norm2', 1e-5), w, 'mlp.0')), w, 'mlp.2')


def norm(x, w, name, eps):
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return scaled * w[f'{name}.weight'] + w[f'{name}.bias']


def linear(x, w, name):
    y = x @ w[f'{name}.weight'].T
    return y + w[f'{name}.bias'] if f'{name}.bias' in w else y


def mix(x, w, name):
    """Applies a 1 x 1 convolution to the channels of each pair of tokens."""
    return torch.einsum('bcmn,dc->bdmn', x, w[f'{name}.weight'][..., 0, 0]) + w[f'{name}.bias'][:, None, None]


def gelu(x):
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2
