import torch
from torch import nn


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """Randomises all weights and statistics of batch norms, so that no zero or one hides a wrong operation."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.02)
        for m in model.modules():
            if isinstance(m, nn.modules.batchnorm._BatchNorm):
                m.running_mean.normal_(std=0.1, generator=generator)
                m.running_var.uniform_(0.5, 1.5, generator=generator)
    model.eval()  # not chained, because eval() of MMDetection's Swin returns None
    return model
