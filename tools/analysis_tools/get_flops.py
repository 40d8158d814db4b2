"""Prints FLOPs and parameters of the model in a config: python tools/analysis_tools/get_flops.py CONFIG --shape 224 224

Like the tools of MMDetection and MMPretrain, the tool counts the whole model. In addition, it counts the backbone of a
detector separately, and prints the FLOPs up to each exit of a cascade. As in the papers, one FLOP is one multiply-add.
"""

import argparse
from typing import Any

import torch
from mmengine.config import Config, DictAction
from mmengine.registry import MODELS
from torch import nn

from mmdtn.analysis import exit_flops, flops_by_module
from mmdtn.dvt import DVT
from mmdtn.errors import UserError, first_line, readable_errors
from mmdtn.models import build, build_backbone, read_config
from mmdtn.registry import class_of, package_of

WHOLE = ('mmdet', 'mmpretrain')  # packages whose models accept a tensor of images


def counted(cfg: Config) -> nn.Module:
    """Builds the model without pretrained weights. For packages outside ``WHOLE``, builds only the backbone."""
    return build(cfg) if is_whole(cfg) else build_backbone(cfg)


def is_whole(cfg: Config) -> bool:
    kind = class_of(cfg.model, MODELS)
    return package_of(kind) in WHOLE or issubclass(kind, DVT)


def count_parts(model: nn.Module, shape: tuple[int, int]) -> dict[str, int]:
    """Returns the FLOPs of each module by name. The whole model has the name ``''``."""
    images, more = torch.zeros(1, 3, *shape), ()
    if package_of(type(model)) == 'mmdet':
        from mmdet.structures import DetDataSample

        sizes = dict.fromkeys(('ori_shape', 'img_shape', 'pad_shape', 'batch_input_shape'), shape)
        more = ([DetDataSample(metainfo=dict(sizes, scale_factor=(1.0, 1.0)))],)
    return flops_by_module(model, images, *more)


def count(model: nn.Module, shape: tuple[int, int]) -> tuple[int, int]:
    """Returns the FLOPs and the number of parameters of a model."""
    return count_parts(model, shape)[''], _parameters(model)


def _parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('config')
    parser.add_argument(
        '--shape', type=int, nargs='+', default=[224, 224], help='height and width of the image, or one number for both'
    )
    parser.add_argument(
        '--cfg-options', nargs='+', action=DictAction, help='settings of the config to change, such as a.b=1 c=[2,3]'
    )
    parser.add_argument('--debug', action='store_true', help='show the traceback of every error')
    args = parser.parse_args()
    if len(args.shape) > 2 or min(args.shape) < 1:
        parser.error(
            f'--shape is {" ".join(map(str, args.shape))}, but should be one or two positive numbers of pixels'
        )
    with readable_errors(args.debug):
        show(args.config, args.shape[0], args.shape[-1], args.cfg_options)


def show(config: str, height: int, width: int, changes: dict[str, Any] | None = None) -> None:
    cfg = read_config(config, changes)
    model = counted(cfg)
    try:
        flops = count_parts(model, (height, width))
    except RuntimeError as error:  # for example, a detector selects more boxes than a small image has
        raise UserError(
            f'The model of {config} cannot run on an image of {height} x {width}: {first_line(error)}. Choose a larger '
            '--shape, such as --shape 800 1344.'
        ) from error
    what = config if is_whole(cfg) else f'the backbone of {config}'
    print(f'{what}: {flops[""] / 1e9:.3f} GFLOPs at {height} x {width}, {_parameters(model) / 1e6:.2f}M parameters')
    if package_of(type(model)) == 'mmdet':
        parameters = _parameters(model.get_submodule('backbone'))
        print(f'  the backbone: {flops["backbone"] / 1e9:.3f} GFLOPs, {parameters / 1e6:.2f}M parameters')
    if isinstance(model, DVT):
        costs = exit_flops(model, torch.zeros(1, 3, height, width))
        for number, (cost, own) in enumerate(zip(costs, model.exits, strict=True), 1):
            millions = sum(p.numel() for p in own.parameters()) / 1e6
            print(f'  up to exit {number}: {cost / 1e9:.3f} GFLOPs; the exit itself has {millions:.2f}M parameters')


if __name__ == '__main__':
    main()
