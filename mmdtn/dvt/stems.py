"""Stems of exits, which convert images ``B x 3 x H x W`` to tokens ``B x h x w x D``."""

from torch import Tensor, nn

from mmdtn.backbones.t2t import SPLITS, Split, TokensToToken, tokens_along

# Choices for T2T-ViT's first split, which give 7, 10 and 14 tokens along 224 px.
FIRST_SPLITS: tuple[Split, ...] = ((14, 8, 3), (11, 6, 5), SPLITS[0])


def t2t_stem(width: int, grid: int, img_size: int) -> nn.Module:
    """Builds T2T-ViT's token module with performers.

    Chooses a first split that yields ``grid x grid`` tokens.
    """
    choices = {tokens_along(img_size, (first, *SPLITS[1:])): first for first in FIRST_SPLITS}
    if grid not in choices:
        raise ValueError(
            f'grids: T2T-ViT can make {sorted(choices)} tokens along {img_size} px, but not {grid}. An arch of '
            'the family "deit" can make any number.'
        )
    return TokensToToken(3, width, performer=True, splits=(choices[grid], *SPLITS[1:]))


class PatchStem(nn.Module):
    """Patch embedding that pads images whose sides are not multiples of the patch size."""

    def __init__(self, width: int, grid: int, img_size: int) -> None:
        super().__init__()
        if grid > img_size:
            raise ValueError(f'grids: an image of {img_size} px has no {grid} patches along a side.')
        patch = -(-img_size // grid)
        self.proj = nn.Conv2d(3, width, patch, patch, padding=-(-(patch * grid - img_size) // 2))

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).permute(0, 2, 3, 1)
