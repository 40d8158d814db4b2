"""Prints how `mmdtn.convert_norms` converts models of timm, MMDetection and MMPretrain.

The models have random weights. With both lambdas at 1, the tool compares the outputs of the original and the converted
model. It measures the largest difference, relative to the largest output, at the example size and at a size that the
conversion has not used. The relative change of all outputs is measured with both lambdas at 0.999. Without arguments,
the tool converts all models listed in docs/convert.md, which takes minutes.

Example:
    python tools/analysis_tools/convertible_models.py
    python tools/analysis_tools/convertible_models.py vit_base_patch16_224 --size 224 224 --report
    python tools/analysis_tools/convertible_models.py CONFIG.py --report
"""

import argparse
import copy
import warnings
from collections import Counter
from collections.abc import Callable

import timm
import torch
from mmengine.registry import MODELS
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mmdtn import models
from mmdtn.errors import readable_errors
from mmdtn.norms import DTN
from mmdtn.norms.dtn import mix_of
from mmdtn.surgery.conversion import ConversionReport, convert_norms

TIMM = [
    'vit_tiny_patch16_224', 'deit3_small_patch16_224', 'beit_base_patch16_224', 'eva02_tiny_patch14_224',
    'vit_small_patch16_dinov3', 'vit_base_patch16_siglip_224', 'samvit_base_patch16_224', 'pit_ti_224',
    'cait_xxs24_224', 'xcit_nano_12_p16_224', 'volo_d1_224', 'swin_tiny_patch4_window7_224',
    'swinv2_tiny_window8_256', 'swinv2_cr_tiny_224', 'pvt_v2_b0', 'twins_svt_small', 'twins_pcpvt_small',
    'davit_tiny', 'mvitv2_tiny', 'gcvit_xxtiny', 'focalnet_tiny_srf', 'maxvit_tiny_tf_224', 'coatnet_nano_rw_224',
    'coat_tiny', 'coat_lite_tiny', 'convnext_atto', 'convnextv2_atto', 'edgenext_xx_small', 'mambaout_femto',
    'mixer_s16_224', 'convit_tiny', 'hiera_tiny_224', 'tnt_s_patch16_224', 'crossvit_tiny_240', 'mobilevit_xxs',
    'nest_tiny',
]  # fmt: skip
MM = {
    'mmdet.PyramidVisionTransformer': dict(num_layers=[1, 1, 1, 1]),
    'mmdet.SwinTransformer': dict(depths=(1, 1, 2, 1)),
    'mmpretrain.ConvNeXt': dict(arch='atto', out_indices=(0, 1, 2, 3)),
    'mmpretrain.VisionTransformer': dict(arch='deit-tiny', img_size=224),
    'mmpretrain.SwinTransformer': dict(arch='tiny', img_size=224, pad_small_map=True),
}


def build(name: str) -> tuple[nn.Module, tuple[int, int]]:
    """Builds a model whose weights make differences visible, and returns the model and its image size."""
    torch.manual_seed(0)
    if name.endswith('.py'):
        model, size = models.build_backbone(models.read_config(name)), (224, 224)
    elif name in MM:
        model, size = MODELS.build(dict(type=name, **MM[name])), (224, 224)
    else:
        model = timm.create_model(name)
        size = model.pretrained_cfg['input_size'][1:]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():  # layer scales near zero and zero biases would hide differences
            p.add_(torch.randn(p.shape, generator=generator) * 0.02)
    model.eval()  # MMDetection's Swin returns None here, so eval() cannot be chained
    return model, (size[0], size[1])


def difference(model: nn.Module, converted: nn.Module, size: tuple[int, int], of_all: bool = False) -> float:
    """Returns the largest relative difference between outputs. With ``of_all``, differences are L2 norms."""
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        outputs, new = ([v for v in tree_leaves(m(images)) if isinstance(v, Tensor)] for m in (model, converted))
    measure: Callable[[Tensor], Tensor] = torch.linalg.vector_norm if of_all else lambda t: t.abs().max()
    return max(float(measure(a - b) / measure(a)) for a, b in zip(outputs, new, strict=True))


def measure(model: nn.Module, size: tuple[int, int]) -> tuple[ConversionReport, list[float]]:
    """Converts a copy of the model, and returns the conversion report and the measurements.

    The measurements are the difference at the example size, the difference at another size if the model accepts one,
    and the change of all outputs.
    """
    converted = copy.deepcopy(model)
    report = convert_norms(converted, size, warm_start=1.0)
    if not report.converted:
        return report, []
    numbers = [difference(model, converted, size)]
    if len(report.sizes) > 1:
        height, width = size
        strict = report.sizes[1] == (height, 2 * width)  # the model accepts only multiples of the example size
        numbers.append(difference(model, converted, (height, 3 * width) if strict else (height - 64, width + 64)))
    with torch.no_grad():
        for layer in converted.modules():
            if isinstance(layer, DTN) and layer.mean_mix is not None and layer.var_mix is not None:
                layer.mean_mix.fill_(mix_of(0.999)), layer.var_mix.fill_(mix_of(0.999))
    return report, [*numbers, difference(model, converted, size, of_all=True)]


def grids(report: ConversionReport) -> str:
    """Lists the token grids, grouped by form and by the number of tokens that precede them."""
    found: dict[tuple[str, int], list[str]] = {}
    for norm in report.converted.values():
        of_form = found.setdefault((norm.layout.form, norm.layout.prefix), [])
        if (grid := f'{norm.grid[0]} x {norm.grid[1]}') not in of_form:
            of_form.append(grid)
    words = [(', '.join(some), f' behind {prefix}' * (prefix > 0), form) for (form, prefix), some in found.items()]
    return '; '.join(f'`{form}` {sides}{behind}' for sides, behind, form in words)


def reasons(report: ConversionReport) -> str:
    """Counts the norms that were not converted, grouped by reason."""
    short = {
        'not in a residual block': 'no block',
        'in the batch dimension': 'windows in the batch',
        'match no grid': 'no grid',
        'no tokens on a grid': 'no grid',
        'in another order': 'another order',
        'cannot be proved': 'not proved',
        'a grid of': 'small grid',
        'not called': 'not called',
        'several shapes': 'several shapes',
        'in training': 'dropped in training',
        'does not compute LayerNorm': 'no LayerNorm',
    }
    found: Counter[str] = Counter()
    for why, number in report.reasons().items():
        found[next(name for words, name in short.items() if words in why)] += number
    return ', '.join(f'{number} {name}' for name, number in found.items())


def row(name: str, report: ConversionReport, numbers: list[float]) -> str:
    """Formats one row of the table."""
    seen = f'{numbers[0]:.0e}' if numbers else ''
    unseen = f'{numbers[1]:.0e}' if len(numbers) == 3 else 'one size' if numbers else ''
    change = f'{numbers[-1]:.0e}' if numbers else ''
    total = len(report.converted) + len(report.kept)
    cells = (f'`{name}`', f'{len(report.converted)} of {total}', grids(report), reasons(report), seen, unseen, change)
    return f'| {" | ".join(cells)} |'


def print_table(models: list[str], size: tuple[int, int] | None, with_reports: bool) -> None:
    print('| model | converted | tokens | not converted | difference | at another size | change at 0.999 |')
    print('|---|---|---|---|---|---|---|')
    for name in models:
        model, own_size = build(name)
        report, numbers = measure(model, size or own_size)
        print(row(name, report, numbers), flush=True)
        if with_reports:
            print(report.details())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        'models', nargs='*', help='timm models, MM backbones or config files (default: all models of the table)'
    )
    parser.add_argument(
        '--size', type=int, nargs=2, metavar=('H', 'W'), help='image size (default: that of each model)'
    )
    parser.add_argument('--report', action='store_true', help='print the outcome for each norm')
    parser.add_argument('--debug', action='store_true', help='show the traceback of every error')
    args = parser.parse_args(arguments)
    warnings.simplefilter('ignore')
    with readable_errors(args.debug):
        print_table(args.models or [*TIMM, *MM], args.size and tuple(args.size), args.report)


if __name__ == '__main__':
    main()
