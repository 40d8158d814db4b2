"""Turns a published checkpoint into one of this package's models, or a model with LayerNorm into one with DTN.

python tools/model_converters/convert.py pvt_tiny.pth --to tiny --out pvt-t.pth
python tools/model_converters/convert.py pvt_tiny.pth --to CONFIG.py --warm-start --out pvt-t-dtn.pth

The result is loaded by init_cfg=dict(type='Pretrained', checkpoint=..., prefix='backbone.'), and as a whole by
load_from and by tools/test.py.
"""

import argparse
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.utils import import_modules_from_strings

import mmdtn
from mmdtn import checkpoints
from mmdtn.backbones import PVTDTN, LeViTDTN, SwinDTN, T2TViTDTN, ViTDTN
from mmdtn.backbones.base import Backbone
from mmdtn.backbones.pvt import DTN_HEADS, LN_HEADS
from mmdtn.checkpoints.convert import split
from mmdtn.checkpoints.formats import FORMATS, State, recognise

CLASSES = {
    'PVTDTN': (PVTDTN, 'cls_token'),
    'SwinDTN': (SwinDTN, 'avg_featmap'),
    'ViTDTN': (ViTDTN, 'cls_token'),
    'T2TViTDTN': (T2TViTDTN, 'cls_token'),
    'LeViTDTN': (LeViTDTN, 'avg_featmap'),
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('source', help='path or URL')
    parser.add_argument('--from', dest='format', choices=checkpoints.CHOICES, default='auto')
    parser.add_argument('--to', required=True, help="a config, or the name of an architecture, as 'tiny' or 's*'")
    parser.add_argument('--out', required=True, type=Path)
    parser.add_argument(
        '--warm-start',
        nargs='?',
        type=float,
        const=0.999,
        metavar='LAMBDA',
        help='LayerNorm to DTN: the share of LayerNorm in all statistics at the start, 0.999 if not said',
    )
    parser.add_argument('--resize', action='store_true', help='interpolate position embeddings and bias tables')
    return parser.parse_args()


def from_config(path: str) -> Config:
    cfg = Config.fromfile(path)
    import_modules_from_strings(**cfg.get('custom_imports', dict(imports=['mmdtn'])))
    init_default_scope(cfg.get('default_scope', 'mmengine'))
    cfg.model.get('backbone', cfg.model).init_cfg = None
    return cfg


def from_arch(name: str, state: State, said: str, warm_start: bool) -> Config:
    """The backbone that computes what the file's model does, with its class token where it has one."""
    kind = recognise(split(state)[0], said)
    if kind.startswith('mmdtn'):
        raise ValueError('A file of this package needs --to CONFIG: its tensors do not tell how it was configured.')
    if FORMATS[kind].backbone not in CLASSES:
        raise ValueError(f'A {kind} file needs --to CONFIG: it holds a whole model, a {FORMATS[kind].backbone}.')
    backbone, out_type = CLASSES[FORMATS[kind].backbone]
    norm_cfg: dict[str, Any] | None = None if backbone is LeViTDTN else dict(type='LN')
    arch: str | dict = name
    options: dict[str, Any] = dict(out_type='featmap' if kind.startswith('mmdet') else out_type)
    if kind.startswith('dtn'):
        norm_cfg = dict(type='DTN', unbiased=True, pool_second_moment=False)
    elif warm_start:
        norm_cfg = dict(type='DTN', prenorm=False, eps=1e-6 if backbone in (PVTDTN, ViTDTN) else 1e-5)
        if backbone is PVTDTN:
            arch = dict(base=name, num_heads=LN_HEADS, norm_heads=DTN_HEADS)
        elif backbone in (ViTDTN, T2TViTDTN):
            options['cls_from'] = 0  # as in the file
    return Config(dict(model=dict(type=backbone.__name__, arch=arch, norm_cfg=norm_cfg, **options)))


def main() -> None:
    args = parse_args()
    try:
        checkpoint = checkpoints.load(args.source)
        state, settings = checkpoints.state_of(checkpoint, args.source), checkpoints.backbone_settings(checkpoint)
        if args.to.endswith('.py'):
            cfg = from_config(args.to)
        else:
            cfg = from_arch(args.to, state, args.format, args.warm_start is not None)
        model = MODELS.build(cfg.model)
        converted, report = checkpoints.convert(
            state, model, args.format, args.warm_start, args.resize, settings=settings
        )
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f'{args.source} was not converted: {error}') from None
    print(report)
    if isinstance(model, Backbone):
        converted = {f'backbone.{key}': value for key, value in converted.items()}
    meta = dict(mmdtn_version=mmdtn.__version__, converted_from=Path(args.source).name, format=report.format)
    meta['cfg'] = cfg.pretty_text  # with which the weights mean what they meant
    checkpoints.write(args.out, dict(state_dict=converted, meta=meta))
    said = {key: value for key, value in cfg.model.get('backbone', cfg.model).items() if value is not None}
    print(f'written: {args.out}, for backbone={said}')


if __name__ == '__main__':
    main()
