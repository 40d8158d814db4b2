"""Transformer encoder that classifies padded sequences of tokens, with the settings of Long-Range Arena."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.model import BaseDataPreprocessor, BaseModel
from mmengine.registry import MODELS
from mmengine.structures import BaseDataElement
from torch import Tensor, nn

from mmdtn.norms import LayerNorm, Place, build_norm
from mmdtn.norms.lengths import Lengths

from .listops import DIGITS, PADDING, VOCABULARY_SIZE


@MODELS.register_module()
class SequencePreprocessor(BaseDataPreprocessor):
    """Preprocessor that pads ``tokens`` to ``max_length`` and stores the numbers of real tokens in ``lengths``."""

    def __init__(self, max_length: int) -> None:
        super().__init__()
        self.max_length = max_length

    def forward(self, data: Mapping[str, Sequence[Any]], training: bool = False) -> dict[str, Any]:
        lengths = [len(tokens) for tokens in data['tokens']]
        if max(lengths) > self.max_length:
            raise ValueError(f'A sequence has {max(lengths)} tokens, but max_length={self.max_length} is the maximum.')
        tokens = torch.full((len(lengths), self.max_length), PADDING)
        for row, sequence, length in zip(tokens, data['tokens'], lengths, strict=True):
            row[:length] = torch.as_tensor(sequence)
        batch = dict(tokens=tokens.to(self.device), lengths=lengths)  # lengths stay on the CPU, where norms read them
        if 'gt_label' in data:
            batch['gt_label'] = torch.as_tensor(data['gt_label']).to(self.device)
        return batch


@MODELS.register_module()
class SequenceClassifier(BaseModel):
    """Pre-norm transformer that classifies sequences with a class token.

    The class token precedes the tokens of the sequence.

    Args:
        attention: Config of the attention, with the type ``'FullAttention'``, ``'BigBirdAttention'`` or
            ``'ReformerAttention'``.
        norm_cfg: Config of the norms in the encoder layers. The final norm is always LayerNorm.
        max_length: Maximum number of tokens in a sequence, not counting the class token.
        vocabulary_size: Number of embeddings, including those for padding and unknown tokens.
        num_classes: Number of classes.
        width: Number of channels.
        depth: Number of encoder layers.
        num_heads: Number of attention heads. DTN uses the same number of heads, and GN the same number of groups.
        mlp: Number of hidden channels in each MLP and in the classifier.
        dropout: Dropout rate of the embedding, of the attention output, and of both layers of each MLP.
        pool_size: Number of tokens that DTN averages into one cell.
        eps: Constant in the denominator of all norms, unless ``norm_cfg`` sets ``eps``.
        masked: Whether the norms exclude padding from their statistics.
    """

    positions: Tensor

    def __init__(
        self,
        attention: dict[str, Any],
        norm_cfg: dict[str, Any],
        max_length: int = 2000,
        vocabulary_size: int = VOCABULARY_SIZE,
        num_classes: int = len(DIGITS),
        width: int = 512,
        depth: int = 4,
        num_heads: int = 8,
        mlp: int = 1024,
        dropout: float = 0.1,
        pool_size: int = 1,
        eps: float = 1e-6,
        masked: bool = True,
        data_preprocessor: dict[str, Any] | None = None,
        init_cfg: dict[str, Any] | None = None,
    ) -> None:
        preprocessor = dict(type='SequencePreprocessor', max_length=max_length)
        super().__init__(data_preprocessor or preprocessor, init_cfg)
        self.max_length, self.masked = max_length, masked
        place = Place(num_heads, pool_size, eps, position_init='line')
        tokens = max_length + 1

        self.embedding = nn.Embedding(vocabulary_size, width)
        self.class_token = nn.Parameter(torch.zeros(width))
        self.register_buffer('positions', sinusoids(tokens, width), persistent=False)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            EncoderLayer(
                attention=dict(attention, channels=width, num_heads=num_heads, max_tokens=tokens, layer=i),
                norms=[build_norm({'eps': eps} | norm_cfg, width, place) for _ in range(2)],
                width=width,
                mlp=mlp,
                dropout=dropout,
            )
            for i in range(depth)
        )
        self.norm = LayerNorm(width, eps=eps)
        self.head = nn.Sequential(nn.Linear(width, mlp), nn.ReLU(), nn.Linear(mlp, num_classes))
        self.apply(_init)

    def forward(
        self, tokens: Tensor, lengths: Lengths, gt_label: Tensor | None = None, mode: str = 'tensor'
    ) -> Tensor | dict[str, Tensor] | list[BaseDataElement]:
        """Classifies a batch of sequences.

        Args:
            tokens: Token ids, ``B x T`` with T up to ``max_length``.
            lengths: Number of real tokens in each sequence.
            gt_label: Class of each sequence, needed for the loss.
            mode: ``'tensor'`` returns the scores ``B x classes``, ``'loss'`` a dict with the loss, and ``'predict'`` a
                list with one result per sequence.
        """
        scores = self.classify(tokens, lengths)
        if mode == 'tensor':
            return scores
        if mode == 'loss':
            assert gt_label is not None
            return dict(loss=F.cross_entropy(scores, gt_label))
        shares = scores.softmax(-1)
        results = [BaseDataElement(pred_score=share, pred_label=share.argmax(-1, keepdim=True)) for share in shares]
        if gt_label is not None:
            for result, label in zip(results, gt_label, strict=True):
                result.gt_label = label[None]
        return results

    def classify(self, tokens: Tensor, lengths: Lengths) -> Tensor:
        if tokens.shape[1] > self.max_length:
            raise ValueError(
                f'The sequences have {tokens.shape[1]} tokens, but max_length={self.max_length} is the maximum.'
            )
        lengths = torch.as_tensor(lengths).cpu() + 1  # counts the class token
        x = torch.cat((self.class_token.expand(len(tokens), 1, -1), self.embedding(tokens)), 1)
        x = self.dropout(x + self.positions[: x.shape[1]])
        real = (torch.arange(x.shape[1]) < lengths[:, None]).to(x.device, non_blocking=True)
        seen = lengths if self.masked else torch.full_like(lengths, x.shape[1])
        for layer in self.layers:
            x = layer(x, real, seen)
        return self.head(self.norm(x[:, 0]))


class EncoderLayer(nn.Module):
    """Pre-norm encoder layer in which attention and MLP each have a residual connection."""

    def __init__(
        self, attention: dict[str, Any], norms: Sequence[nn.Module], width: int, mlp: int, dropout: float
    ) -> None:
        super().__init__()
        for norm in norms:
            if 'lengths' not in inspect.signature(norm.forward).parameters:
                raise ValueError(
                    f'{type(norm).__name__} cannot normalise padded sequences, because its forward method does not '
                    "take lengths. Choose 'DTN', 'LN' or another norm of mmdtn."
                )
        self.norm1, self.norm2 = norms
        self.attention = MODELS.build(attention)
        self.dropout = nn.Dropout(dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, mlp),
            nn.GELU(approximate='tanh'),
            nn.Dropout(dropout),
            nn.Linear(mlp, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor, real: Tensor, lengths: Lengths) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x, lengths=lengths), real))
        return x + self.mlp(self.norm2(x, lengths=lengths))


def sinusoids(places: int, channels: int) -> Tensor:
    """Returns ``places x channels`` sinusoidal embeddings. Even channels are sines, and odd channels are cosines."""
    frequency = 10_000.0 ** (-torch.arange(0, channels, 2, dtype=torch.float64) / channels)
    angle = torch.arange(places)[:, None] * frequency
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1)[:, :channels].float()


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
