"""Folds norms that are affine in evaluation mode into the neighbouring layers of a trained model.

The tool writes FUSED.pth and the config FUSED.py, which builds the fused model. All tools accept this pair of files.
For each norm of the backbone, the tool prints the layer into which the norm was folded, or the reason why the norm
remains. The tool also compares both models on random images.

Example:
    python tools/model_converters/fuse.py CONFIG CHECKPOINT --out FUSED.pth
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mmdtn
from mmdtn import checkpoints
from mmdtn.analysis import flops_by_module
from mmdtn.backbones import LeViTDTN
from mmdtn.backbones.base import Backbone
from mmdtn.engine.cpu import keep_freed_memory
from mmdtn.errors import UserError, readable_errors
from mmdtn.models import load
from mmdtn.registry import package_of
from mmdtn.surgery.fusion import FusedNorm, fuse


def convert(config: str, checkpoint: str, out: Path) -> tuple[nn.Module, nn.Module, list[FusedNorm], int]:
    """Writes the fused model and its config.

    Returns the original model, the fused model, the outcome for each norm, and the number of input channels.
    """
    for file in (out, out.with_suffix('.py')):
        if file.resolve() in (Path(config).resolve(), Path(checkpoint).resolve()):
            raise UserError(f'--out {out} would overwrite {file}: give another name.')
    trained = load(config, checkpoint)
    model, cfg = trained.model, trained.cfg
    try:
        fused, outcomes = fuse(model)
    except ValueError as error:
        raise UserError(str(error)) from None
    names = [o.name.removeprefix('backbone.') for o in outcomes if o.into]
    if not names:
        raise UserError(f'No norm of {config} can be fused: {outcomes[0].why if outcomes else "it has none"}.')
    backbone = cfg.model.get('backbone', cfg.model)
    backbone.fused = [*backbone.get('fused', ()), *names]
    backbone.init_cfg, cfg.load_from, cfg.resume = None, None, False
    cfg.setdefault('custom_imports', dict(imports=['mmdtn']))
    whole = checkpoints.load(checkpoint)
    meta: dict[str, Any] = whole.get('meta', {}) if isinstance(whole, dict) else {}
    meta |= dict(cfg=cfg.pretty_text, mmdtn_version=mmdtn.__version__, fused_from=Path(checkpoint).name)
    checkpoints.write(out, dict(state_dict=fused.state_dict(), meta=meta))
    cfg.dump(out.with_suffix('.py'))
    return model, fused, outcomes, backbone.get('in_channels', 3)


def show(outcomes: Sequence[FusedNorm]) -> None:
    width = max(len(o.name) for o in outcomes)
    for o in outcomes:
        print(f'{o.name:{width}}  {o.kind:12} {f"-> {o.into}" if o.into else f"not fused: {o.why}"}')
    print(f'{sum(bool(o.into) for o in outcomes)} of {len(outcomes)} norms fused')


def run(model: Any, x: Tensor) -> Sequence[Tensor]:
    """Returns the features of a backbone or of a detector's neck, or a classifier's scores."""
    if package_of(type(model)) == 'mmpretrain':
        return [model(x, mode='tensor')]
    return model(x) if isinstance(model, Backbone) else model.extract_feat(x)


def only_size(model: nn.Module) -> tuple[int, int]:
    return next((m.img_size for m in model.modules() if isinstance(m, LeViTDTN)), (224, 224))


@torch.no_grad()
def compare(model: nn.Module, fused: nn.Module, shape: tuple[int, ...], repeats: int) -> None:
    x = torch.randn(shape)
    pairs = zip(run(model, x), run(fused, x), strict=True)
    difference = max(((a - b).abs().max() / a.abs().max()).item() for a, b in pairs)
    print(f'{" x ".join(map(str, shape))}: outputs differ by {difference:.1e} of the largest')
    counted = [m if package_of(type(m)) == 'mmpretrain' else getattr(m, 'backbone', m) for m in (model, fused)]
    before, after = (flops_by_module(m, x[:1])[''] / 1e9 for m in counted)
    print(f'{before:.5g} GFLOPs before, {after:.5g} after, {after / before:.4f}x, one image')
    times: list[tuple[float, float]] = []
    for i in range(repeats):
        pair = {}
        for m in (model, fused) if i % 2 else (fused, model):
            start = time.perf_counter()
            run(m, x)
            pair[m] = time.perf_counter() - start
        times.append((pair[model], pair[fused]))
    before, after = (statistics.median(t) for t in zip(*times, strict=True))
    ratio = statistics.median(b / a for a, b in times)
    where = f'CPU, {torch.get_num_threads()} threads, torch {torch.__version__}, float32'
    print(f'{1000 * before:.1f} ms before, {1000 * after:.1f} ms after, {ratio:.3f}x, medians of {repeats}; {where}')


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config')
    parser.add_argument('checkpoint')
    parser.add_argument('--out', required=True, type=Path, metavar='FUSED.pth')
    parser.add_argument(
        '--shape',
        type=int,
        nargs=2,
        metavar=('H', 'W'),
        help='image size of the comparison (default: 224 224, or the size of the model)',
    )
    parser.add_argument('--repeats', type=int, default=10, help='number of timed runs (default: %(default)s)')
    parser.add_argument('--debug', action='store_true', help='show the traceback of every error')
    args = parser.parse_args(arguments)
    if args.out.suffix != '.pth':
        parser.error(f'--out {args.out}: give a .pth file. The config is written next to it.')
    if args.repeats < 1:
        parser.error('--repeats: give at least 1')
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    keep_freed_memory()
    with readable_errors(args.debug):
        model, fused, outcomes, channels = convert(args.config, args.checkpoint, args.out)
        show(outcomes)
        print(f'written: {args.out} and {args.out.with_suffix(".py")}')
        compare(model, fused, (1, channels, *(args.shape or only_size(model))), args.repeats)


if __name__ == '__main__':
    main()
