"""Collects the values of a report from forward passes of a model."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from mmdtn.backbones.layers import Block
from mmdtn.models import TrainedModel
from mmdtn.norms import DTN

from .attention import attention_distance, class_token_attention
from .capture import BlockTokens
from .look import Seen, look
from .tokens import means, seen_by, variation

PICTURES = 3  # number of images whose maps and predictions are drawn
LOOKS = 4  # number of blocks whose maps are drawn


@dataclass
class Observation:
    """Values of one model, collected over all images."""

    trained: TrainedModel
    distances: dict[str, list] = field(default_factory=lambda: defaultdict(list))  # by block
    variations: dict[str, dict[str, list]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    first: Seen | None = None
    looks: list[tuple[Any, ...]] = field(default_factory=list)  # image, sample, maps
    class_attention: list[tuple[Seen, Tensor]] = field(default_factory=list)  # attention maps of the last block

    @property
    def layers(self) -> dict[str, DTN]:
        """DTN layers of all blocks that have run, by name. For DINO, these are the layers of the teacher."""
        assert self.first is not None
        ran = tuple(f'{block.name}.' for block in self.first.blocks)
        modules = self.trained.model.named_modules()
        return {name: m for name, m in modules if isinstance(m, DTN) and name.startswith(ran)}

    def norms(self) -> dict[str, tuple[BlockTokens, nn.Module, Tensor, Tensor]]:
        """Returns the block, module, input tokens and output tokens of each norm for the first image, by norm name."""
        assert self.first is not None
        return {
            f'{b.name}.{n}': (b, b.block.get_submodule(n), b.on_grid(b.before[n]), b.on_grid(b.after[n]))
            for b in self.first.blocks
            for n in b.before
        }

    def shown_norms(self) -> list[str]:
        """Names the first, the middle and the last DTN layer that precedes an attention layer.

        If the model has no such layer, the function chooses from other norms that precede attention layers. If there
        are none, it chooses from all DTN layers or from all norms.
        """
        of_dtn = [n for n, (_, norm, _, _) in self.norms().items() if isinstance(norm, DTN)]
        names = next(
            some
            for some in (
                [n for n in among if n.endswith(end)] for end in ('norm1', '') for among in (of_dtn, self.norms())
            )
            if some
        )
        return [names[i] for i in sorted({0, len(names) // 2, len(names) - 1})]


def observe(trained: TrainedModel, images: list[dict]) -> Observation:
    run = Observation(trained)
    for i, seen in enumerate(look(trained, images)):
        for block in seen.blocks:
            if isinstance(block.block, Block):
                run.distances[block.name].append(attention_distance(block))
            for name in block.before:
                norm = block.block.get_submodule(name)
                tokens = seen_by(norm, block.on_grid(block.before[name]))
                for kind, mean in means(norm, tokens).items():
                    values = variation(tokens, mean)
                    run.variations[f'{block.name}.{name}'][kind].append((values.mean().item(), values.median().item()))
        if i == 0:
            run.first = seen
        if i < PICTURES:
            maps = []
            for block in _spread_blocks(seen.blocks):
                assert block.output is not None
                magnitude = block.on_grid(block.output)[0].norm(dim=-1).numpy()
                maps.append((block.name, seen.without_padding(magnitude)))
            run.looks.append((seen, maps))
            if seen.blocks[-1].has_class_token:
                run.class_attention.append((seen, class_token_attention(seen.blocks[-1])))
    return run


def _spread_blocks(blocks: list[BlockTokens]) -> list[BlockTokens]:
    """Returns the last block of each map size, or evenly spaced blocks if all maps have the same size."""
    last = {}
    for block in blocks:
        assert block.output is not None
        last[block.on_grid(block.output).shape[1:3]] = block
    if len(last) > 1:
        return [*last.values()][:LOOKS]
    count = min(LOOKS, len(blocks))
    return [blocks[(i + 1) * len(blocks) // count - 1] for i in range(count)]
