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

import mmdtn
from mmdtn import checkpoints
from mmdtn.backbones.base import Backbone
from mmdtn.backbones.pvt import DTN_HEADS, STAGES
from mmdtn.checkpoints.dtn import NORM_CFG as DTN_AUTHORS
from mmdtn.checkpoints.format import State
from mmdtn.checkpoints.formats import FORMATS, recognise
from mmdtn.checkpoints.translation import split
from mmdtn.errors import readable_errors
from mmdtn.models import build, read_config


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
    parser.add_argument('--debug', action='store_true', help='show the traceback of every error')
    return parser.parse_args()


def from_config(path: str) -> Config:
    cfg = read_config(path)
    cfg.model.get('backbone', cfg.model).init_cfg = None
    return cfg


def from_arch(name: str, state: State, said: str, warm_start: bool) -> Config:
    """The backbone that computes what the model of the file does, with a class token where that has one."""
    theirs = split(state)[0]
    file = recognise(theirs, said)
    kind = FORMATS[file]
    if kind.is_own:
        raise ValueError('A file of this package needs --to CONFIG: its tensors do not tell how it was configured.')
    if kind.out_type is None:
        raise ValueError(f'A {file} file needs --to CONFIG: it holds a whole model, a {kind.backbone}.')
    norm_cfg = kind.norm_cfg
    arch: Any = name
    options: dict[str, Any] = dict(out_type=kind.out_type, **kind.settings(theirs))
    if kind.backbone == 'PVTDTN' and norm_cfg != DTN_AUTHORS:
        arch = dict(base=name, num_heads=tuple(kind.heads(f'stages.{i}.blocks.0.attn', {}) for i in range(STAGES)))
    if warm_start and norm_cfg != DTN_AUTHORS:
        norm_cfg = dict(type='DTN', prenorm=False, eps=kind.eps('blocks.0.norm1', {}) or 1e-5)
        if kind.backbone == 'PVTDTN':
            arch |= dict(norm_heads=DTN_HEADS)
        elif kind.backbone in ('ViTDTN', 'T2TViTDTN'):
            options.setdefault('cls_from', 0)  # as in the file
    return Config(dict(model=dict(type=kind.backbone, arch=arch, norm_cfg=norm_cfg, **options)))


def convert(args: argparse.Namespace) -> None:
    try:
        checkpoint = checkpoints.load(args.source)
        state, settings = checkpoints.state_of(checkpoint, args.source), checkpoints.backbone_settings(checkpoint)
        if args.to.endswith('.py'):
            cfg = from_config(args.to)
        else:
            cfg = from_arch(args.to, state, args.format, args.warm_start is not None)
        model = build(cfg)
        converted, report = checkpoints.translate(
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


def main() -> None:
    args = parse_args()
    with readable_errors(args.debug):
        convert(args)


if __name__ == '__main__':
    main()
