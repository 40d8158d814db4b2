"""Compares the speed and memory of backbones with DTN, with LayerNorm, and from other packages.

In each round, the models of a family take turns, so that their ratios are reliable. Times and ratios are medians over
all rounds. With --count, the tool computes a GPU's kernel launches and memory traffic, but needs no GPU.

Example:
    python tools/analysis_tools/benchmark_backbone.py --models pvt swin vit --repeats 5 --only 224
    python tools/analysis_tools/benchmark_backbone.py --count --models pvt
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import timm
import torch
from mmdet.models.backbones.pvt import PyramidVisionTransformer
from mmdet.models.backbones.swin import SwinTransformer
from torch import Tensor, nn

from mmdtn.analysis import SavedBytes
from mmdtn.backbones import PVTDTN, SwinDTN, ViTDTN
from mmdtn.benchmarks.traffic import count_backbone
from mmdtn.engine.cpu import keep_freed_memory
from mmdtn.errors import readable_errors
from mmdtn.surgery.fusion import fuse

LN = dict(type='LN')
BN = dict(norm_cfg=dict(type='BN'), other_norm_cfg=dict(type='BN'))
DTN_HEADS = dict(base='tiny', num_heads=(4, 4, 5, 8))
# Each family lists model names, models, and the name of the model with which each is compared.
FAMILIES: dict[str, dict[str, tuple[Callable[[], nn.Module], str | None]]] = {
    'pvt': {
        'PVT-Tiny LN, heads 4 4 5 8': (lambda: PVTDTN(DTN_HEADS, norm_cfg=LN), None),
        'PVT-Tiny DTN': (lambda: PVTDTN('tiny'), 'PVT-Tiny LN, heads 4 4 5 8'),
        "MMDetection's PVT-Tiny": (lambda: PyramidVisionTransformer(num_layers=[2, 2, 2, 2]), None),
        'PVT-Tiny LN': (lambda: PVTDTN('tiny', norm_cfg=LN), "MMDetection's PVT-Tiny"),
    },
    'swin': {
        "MMDetection's Swin-T": (lambda: SwinTransformer(drop_path_rate=0.2), None),
        'Swin-T LN': (lambda: SwinDTN('tiny', norm_cfg=LN), "MMDetection's Swin-T"),
        'Swin-T DTN': (lambda: SwinDTN('tiny'), 'Swin-T LN'),
    },
    'vit': {
        'ViT-S* LN': (lambda: ViTDTN('s*', norm_cfg=LN), None),
        'ViT-S* DTN': (lambda: ViTDTN('s*'), 'ViT-S* LN'),
        "timm's ViT-S": (
            lambda: timm.create_model(
                'vit_small_patch16_224', dynamic_img_size=True, num_classes=0, drop_path_rate=0.1
            ),
            None,
        ),
        'ViT-S LN': (lambda: ViTDTN('s', norm_cfg=LN), "timm's ViT-S"),
    },
    # These models use evaluation mode, because batch norms are affine only in this mode.
    'fused': {
        'PVT-Tiny LN': (lambda: PVTDTN('tiny', norm_cfg=LN).eval(), None),
        'PVT-Tiny BN': (lambda: PVTDTN('tiny', **BN).eval(), 'PVT-Tiny LN'),
        'PVT-Tiny BN, fused': (lambda: fuse(PVTDTN('tiny', **BN))[0], 'PVT-Tiny LN'),
        'ViT-S LN': (lambda: ViTDTN('s', norm_cfg=LN).eval(), None),
        'ViT-S BN': (lambda: ViTDTN('s', **BN).eval(), 'ViT-S LN'),
        'ViT-S BN, fused': (lambda: fuse(ViTDTN('s', **BN))[0], 'ViT-S LN'),
    },
}
COLUMNS = dict(train_s='{:.3f} s', infer_s='{:.3f} s', saved_mib='{:.0f} MiB')
INPUTS = {'224': (8, 3, 224, 224), '800': (1, 3, 800, 1344)}


def train_step(model: nn.Module, x: Tensor) -> int:
    """Runs a forward and a backward pass, and returns the number of bytes saved for the backward pass."""
    with SavedBytes(model) as saved:
        loss = sum(m.mean() for m in model(x))
    loss.backward()
    return saved.total


def infer(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model(x)


def measure(family: str, shape: tuple[int, ...], repeats: int) -> dict[str, dict]:
    x = torch.randn(shape)
    models = {name: make() for name, (make, _) in FAMILIES[family].items()}
    rounds: dict[str, dict[str, list[float]]] = {}
    for name, model in models.items():
        infer(model, x)  # includes compilation and warm-up
        rounds[name] = dict(infer_s=[])
        if model.training:
            train_step(model, x)
            rounds[name] |= dict(train_s=[], saved_mib=[train_step(model, x) / 2**20])
    for _ in range(repeats):
        for name, model in models.items():
            for kind, run in dict(train_s=train_step, infer_s=infer).items():
                if kind in rounds[name]:
                    start = time.perf_counter()
                    run(model, x)
                    rounds[name][kind].append(time.perf_counter() - start)
    rows: dict[str, dict] = {}
    for name, values in rounds.items():
        rows[name] = {key: statistics.median(of) for key, of in values.items()}
        if peer := FAMILIES[family][name][1]:
            pairs = {key: zip(of, rounds[peer][key], strict=True) for key, of in values.items()}
            rows[name] |= dict(
                against=peer, ratios={key: statistics.median(a / b for a, b in of) for key, of in pairs.items()}
            )
    return rows


def line(name: str, values: dict[str, float], formats: dict[str, str]) -> str:
    columns = (form.format(values[key]) if key in values else '' for key, form in formats.items())
    return (f'{name:30}' + ''.join(f'{column:>12}' for column in columns)).rstrip()


def count(families: list[str], shape: tuple[int, ...]) -> None:
    if os.environ.get('TRITON_INTERPRET') != '1':  # Triton reads this when defining kernels, so a restart is needed
        environment = dict(os.environ, TRITON_INTERPRET='1')
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment).returncode)
    print(f'forward, {" x ".join(map(str, shape))}, float32')
    for family in families:
        for name, (build, _) in FAMILIES[family].items():
            launches, moved = count_backbone(build, shape)
            print(f'{name:30}{launches:6} launches{moved / 2**20:10.0f} MiB moved', flush=True)


def run(args: argparse.Namespace) -> None:
    if args.count:
        count(args.models, INPUTS[args.only or '224'])
        return
    torch.manual_seed(0)
    keep_freed_memory()  # as in tools/train.py; without it, memory allocation dominates the ratios
    print(f'torch {torch.__version__}, {torch.get_num_threads()} threads, float32')
    for family, key in itertools.product(args.models, [args.only] if args.only else INPUTS):
        shape = INPUTS[key]
        print(f'\n{" x ".join(map(str, shape)):30}{"train step":>12}{"inference":>12}{"saved":>12}', flush=True)
        for name, row in measure(family, shape, args.repeats).items():
            print(line(name, row, COLUMNS))
            if 'ratios' in row:
                print(line(f'  / {row["against"]}', row['ratios'], dict.fromkeys(COLUMNS, '{:.2f}x')))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        '--models', nargs='+', choices=FAMILIES, default=list(FAMILIES), help='families to compare (default: all)'
    )
    parser.add_argument('--repeats', type=int, default=5)
    parser.add_argument('--only', choices=INPUTS, help='use only one of the two inputs')
    parser.add_argument('--count', action='store_true', help='count launches and bytes of a forward pass on a GPU')
    parser.add_argument('--debug', action='store_true', help='show the traceback of every error')
    args = parser.parse_args()
    with readable_errors(args.debug):
        run(args)


if __name__ == '__main__':
    main()
