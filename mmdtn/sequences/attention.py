"""Self-attention modules for long padded sequences: full attention, BigBird and Reformer.

Each module takes tokens of shape ``B x T x C`` and a mask ``real`` of shape ``B x T``, which is True for real tokens.
Real tokens precede the padding and never attend to padding. The number of blocks or chunks depends on ``max_tokens``,
not on T, so additional padding does not change the output.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from mmengine.registry import MODELS
from torch import Tensor, nn


@MODELS.register_module()
class FullAttention(nn.Module):
    """Multi-head self-attention in which every token attends to all real tokens. The linear layers have no bias.

    Args:
        channels: Number of channels, C.
        num_heads: Number of heads, K.
        max_tokens, layer: Unused. The encoder passes both arguments to every attention module.
        dropout: Dropout rate of the attention weights.
    """

    def __init__(
        self, channels: int, num_heads: int, max_tokens: int | None = None, layer: int = 0, dropout: float = 0.1
    ) -> None:
        super().__init__()
        if channels % num_heads:
            raise ValueError(f'num_heads={num_heads} does not divide {channels} channels.')
        self.num_heads, self.dropout = num_heads, dropout
        self.q, self.k, self.v, self.out = (nn.Linear(channels, channels, bias=False) for _ in range(4))

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.num_heads) for layer in (self.q, self.k, self.v))
        return self.out(merge_heads(self.attend(q, k, v, real)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        """Computes attention for queries, keys and values of shape ``B x K x T x c``, and returns the same shape."""
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=real[:, None, None], dropout_p=dropout)


@MODELS.register_module()
class BigBirdAttention(FullAttention):
    """Block-sparse attention with the fixed mask of :func:`bigbird_mask` (Zaheer et al., arXiv 2007.14062).

    For each query block, the module gathers the few key blocks that the mask allows. Attention scores are computed only
    for these blocks.

    Args:
        channels: Number of channels, C.
        num_heads: Number of heads, K. Each head has its own random blocks.
        max_tokens: Maximum number of tokens in a sequence, which determines the number of blocks.
        layer: Index of the layer, used as the seed of the random blocks.
        block_size: Number of tokens in a block.
        random_blocks: Number of random blocks that each block attends to.
        random_tokens: Random blocks are chosen among the first ``random_tokens`` tokens of the sequence.
    """

    seen: Tensor
    counts: Tensor

    def __init__(
        self,
        channels: int,
        num_heads: int,
        max_tokens: int,
        layer: int = 0,
        block_size: int = 64,
        random_blocks: int = 3,
        random_tokens: int = 1024,
    ) -> None:
        super().__init__(channels, num_heads, dropout=0.0)
        self.block_size = block_size
        self.num_blocks = math.ceil(max_tokens / block_size)
        mask = bigbird_mask(self.num_blocks, num_heads, layer, random_blocks, random_tokens // block_size)
        self.sees_all = bool(mask.all())
        middle = mask[:, 1:-1]  # the first and last blocks attend to all blocks
        # Visible blocks are sorted to the front. Rows with fewer visible blocks are padded with masked blocks.
        counts, seen = middle.int().sort(dim=-1, descending=True, stable=True)
        most = int(middle.sum(-1).max()) if middle.numel() else 0
        self.register_buffer('seen', seen[..., :most].contiguous(), persistent=False)
        self.register_buffer('counts', counts[..., :most].bool(), persistent=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        if self.sees_all:
            return super().attend(q, k, v, real)
        T = q.shape[2]
        q, k, v = (pad_tokens(t, self.num_blocks * self.block_size) for t in (q, k, v))
        real = pad_tokens(real[..., None], self.num_blocks * self.block_size)[..., 0]
        ends = torch.cat((q[:, :, : self.block_size], q[:, :, -self.block_size :]), 2)
        first, last = super().attend(ends, k, v, real).chunk(2, 2)
        middle = self._attend_to_blocks(q[:, :, self.block_size : -self.block_size], k, v, real)
        return torch.cat((first, middle, last), 2)[:, :, :T]

    def _attend_to_blocks(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        """Computes the attention of the middle query blocks to their visible blocks.

        For torch's attention, each of the M blocks of S queries becomes a separate head, ``B x (K M) x S x c``.
        """
        K, M, n = self.seen.shape
        heads = torch.arange(K, device=k.device)[:, None, None]
        chosen = (heads * self.num_blocks + self.seen).flatten()

        def gather(t: Tensor) -> Tensor:
            blocks = t.unflatten(2, (self.num_blocks, self.block_size)).flatten(1, 2)
            return blocks.index_select(1, chosen).unflatten(1, (K * M, n)).flatten(2, 3)

        real = real.unflatten(1, (self.num_blocks, self.block_size))[:, self.seen] & self.counts[..., None]
        queries = q.unflatten(2, (M, self.block_size)).flatten(1, 2)
        y = F.scaled_dot_product_attention(
            queries, gather(k), gather(v), attn_mask=real.flatten(1, 2).flatten(2)[:, :, None]
        )
        return y.unflatten(1, (K, M)).flatten(2, 3)


def bigbird_mask(num_blocks: int, num_heads: int, seed: int, random_blocks: int = 3, random_from: int = 16) -> Tensor:
    """Returns BigBird's block mask from Long-Range Arena, with shape ``K x blocks x blocks``.

    An entry is True if the query block attends to the key block. The first and last blocks attend to all blocks, and
    all blocks attend to them. Every other block also attends to itself, to its two neighbours, and to random blocks
    among the first ``random_from`` blocks. Each head has its own random blocks.
    """
    block = torch.arange(num_blocks, device='cpu')  # even a model on the meta device needs real values here
    mask = ((block[:, None] - block).abs() <= 1).repeat(num_heads, 1, 1)
    for end in (0, -1):
        mask[:, end] = mask[:, :, end] = True
    # If called in this order, NumPy's legacy generator draws the same random blocks as Long-Range Arena's code.
    rng = np.random.RandomState(seed)
    for head in mask:
        for i in range(1, num_blocks - 1):
            last = min(num_blocks, random_from) - 1
            if i > 2:  # Long-Range Arena's code chooses among fewer blocks in the last two rows
                last -= {num_blocks - 3: 4, num_blocks - 2: 3}.get(i, 0)
            candidates = [j for j in range(1, min(last, num_blocks - 2) + 1) if abs(i - j) > 1]
            head[i, rng.permutation(candidates)[:random_blocks].astype(int)] = True
    return mask


OWN_TOKEN = -1e4  # bias that keeps a token from attending to itself if it can attend to another token


@MODELS.register_module()
class ReformerAttention(nn.Module):
    """Attention among tokens with similar hashes, as in Reformer (Kitaev et al., arXiv 2001.04451).

    As in Long-Range Arena, queries and keys are shared, and the output is not projected. Each head sorts the tokens by
    hash bucket and then by position, puts padding last, and splits the result into chunks. A token attends to its own
    chunk and to the previous one. For the first chunk, the last chunk takes the place of the previous one. A token
    attends to itself only if the two chunks contain no other real token.

    Args:
        channels: Number of channels, C.
        num_heads: Number of heads, K.
        max_tokens: Maximum number of tokens in a sequence, which determines the size of a chunk.
        layer: Unused. All layers use the same hash function.
        num_buckets: Number of hash buckets, an even number.
        num_chunks: Number of chunks in a sequence of ``max_tokens`` tokens.
    """

    rotation: Tensor

    def __init__(
        self,
        channels: int,
        num_heads: int,
        max_tokens: int,
        layer: int = 0,
        num_buckets: int = 10,
        num_chunks: int = 10,
    ) -> None:
        super().__init__()
        if channels % num_heads:
            raise ValueError(f'num_heads={num_heads} does not divide {channels} channels.')
        if num_buckets % 2:
            raise ValueError(f'num_buckets={num_buckets} is odd, but ReformerAttention needs an even number.')
        self.num_heads, self.num_buckets, self.num_chunks = num_heads, num_buckets, num_chunks
        self.chunk_size = math.ceil(max_tokens / num_chunks)
        self.qk, self.v = (nn.Linear(channels, channels, bias=False) for _ in range(2))
        generator = torch.Generator().manual_seed(0)  # all layers and all runs use the same hash function
        self.register_buffer('rotation', torch.randn(channels // num_heads, num_buckets // 2, generator=generator))

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        T, whole = x.shape[1], self.num_chunks * self.chunk_size
        qk, v = (pad_tokens(split_heads(layer(x), self.num_heads), whole) for layer in (self.qk, self.v))
        real = pad_tokens(real[..., None], whole)[..., 0]
        order = self.sort(qk, real)[..., None].expand_as(qk)
        qk, v = (self.chunks(t.gather(2, order)) for t in (qk, v))
        parts = (qk, self.with_chunk_before(qk), self.with_chunk_before(v), self.bias(real).to(qk.dtype))
        # Each chunk becomes a separate sequence in the batch for torch's attention.
        queries, keys, values, bias = (t.flatten(0, 1) for t in parts)
        y = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias)
        y = y.unflatten(0, (-1, self.num_chunks)).transpose(1, 2).flatten(2, 3)
        return merge_heads(torch.empty_like(y).scatter(2, order, y)[:, :, :T])

    @torch.no_grad()
    def sort(self, qk: Tensor, real: Tensor) -> Tensor:
        """Returns the token positions after sorting by bucket, with shape ``B x K x T``."""
        rotated = qk.float() @ self.rotation.float()
        bucket = torch.cat((rotated, -rotated), -1).argmax(-1)
        return bucket.masked_fill(~real[:, None], self.num_buckets).argsort(dim=-1, stable=True)

    def chunks(self, x: Tensor) -> Tensor:
        """Splits a tensor ``B x K x T x c`` into n chunks of S tokens, giving ``B x n x K x S x c``."""
        return x.unflatten(2, (self.num_chunks, self.chunk_size)).transpose(1, 2)

    def with_chunk_before(self, chunks: Tensor) -> Tensor:
        """Appends the previous chunk to each chunk, giving ``B x n x K x 2S x c``. A single chunk is unchanged."""
        return torch.cat((chunks, chunks.roll(1, 1)), 3) if self.num_chunks > 1 else chunks

    def bias(self, real: Tensor) -> Tensor:
        """Returns the bias for the attention scores, with shape ``B x n x 1 x S x 2S``.

        The bias is the same for all heads, because every head sorts the padding to the end.
        """
        padding = torch.zeros(real.shape, device=real.device).masked_fill(~real, -math.inf)
        padding = self.with_chunk_before(self.chunks(padding[:, None, :, None])).mT.repeat(1, 1, 1, self.chunk_size, 1)
        padding.diagonal(dim1=-2, dim2=-1).fill_(OWN_TOKEN)
        return padding


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def pad_tokens(x: Tensor, tokens: int) -> Tensor:
    """Pads a tensor ``... x T x c`` with zeros or False to the given number of tokens."""
    if x.shape[-2] > tokens:
        raise ValueError(f'The sequences have {x.shape[-2]} tokens, but max_tokens allows at most {tokens}.')
    return F.pad(x, (0, 0, 0, tokens - x.shape[-2]))
