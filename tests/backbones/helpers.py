import torch
from torch import nn


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights that let a wrong order of operations show: no zeros, no ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.02)
    model.eval()  # MMDetection's Swin returns nothing here
    return model
