"""FLOPs and parameters of a config's model: python tools/analysis_tools/get_flops.py CONFIG --shape 224 224

Counts the whole of a classifier and the backbone of a detector. A FLOP is a multiply-add, as in the papers' tables.
"""

import argparse
from math import prod
from typing import Any

import torch
from mmengine.analysis import FlopAnalyzer
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from mmdtn.norms import DTN
from mmdtn.registry import class_of, package_of


def attention_flops(inputs: list[Any], outputs: list[Any]) -> int:
    """Scores and weighted sum of ``aten::scaled_dot_product_attention``, which mmengine does not count."""
    query, key, value = (tensor.type().sizes() for tensor in inputs[:3])
    return prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def count(config: str, shape: tuple[int, int]) -> tuple[int, int]:
    """FLOPs and parameters."""
    cfg = Config.fromfile(config)
    init_default_scope(cfg.default_scope)
    if package_of(class_of(cfg.model, MODELS)) == 'mmpretrain':
        cfg.model.pop('train_cfg', None)
        model = MODELS.build(cfg.model).eval()
    else:
        cfg.model.backbone.init_cfg = None
        model = MODELS.build(cfg.model.backbone).eval()

    normalised = 0

    def count_elements(module: DTN, inputs: tuple[torch.Tensor, ...]) -> None:
        nonlocal normalised
        normalised += inputs[0].numel()

    image = torch.zeros(1, 3, *shape)
    hooks = [m.register_forward_pre_hook(count_elements) for m in model.modules() if isinstance(m, DTN)]
    with torch.no_grad():
        model(image)
        for hook in hooks:
            hook.remove()
        analyzer = FlopAnalyzer(model, (image,)).unsupported_ops_warnings(False).tracer_warnings('none')
        analyzer.set_op_handle('aten::scaled_dot_product_attention', attention_flops)
        flops = int(analyzer.total())
    # mmengine counts the products of P, but not the elementwise part: 5 for each element, as it says of LayerNorm.
    return flops + 5 * normalised, sum(p.numel() for p in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('config')
    parser.add_argument('--shape', type=int, nargs=2, default=(224, 224), metavar=('H', 'W'))
    args = parser.parse_args()
    flops, parameters = count(args.config, tuple(args.shape))
    height, width = args.shape
    print(f'{args.config}: {flops / 1e9:.3f} GFLOPs at {height} x {width}, {parameters / 1e6:.2f}M parameters')


if __name__ == '__main__':
    main()
