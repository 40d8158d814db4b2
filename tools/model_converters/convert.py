"""Converts a published checkpoint to one of this package, optionally replacing LayerNorm with DTN.

To load the result, use init_cfg=dict(type='Pretrained', checkpoint=..., prefix='backbone.'), load_from, or
tools/test.py.

Example:
    python tools/model_converters/convert.py pvt_tiny.pth --to tiny --out pvt-t.pth
    python tools/model_converters/convert.py pvt_tiny.pth --to CONFIG.py --warm-start --out pvt-t-dtn.pth
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.registry import MODELS

import mmdtn
from mmdtn import checkpoints
from mmdtn.backbones.base import Backbone
from mmdtn.backbones.pvt import DTN_HEADS, STAGES
from mmdtn.checkpoints.format import State
from mmdtn.checkpoints.formats import FORMATS, recognise
from mmdtn.checkpoints.translation import split
from mmdtn.errors import readable_errors
from mmdtn.models import build, read_config
from mmdtn.registry import class_of
from mmdtn.selfsup import DINO


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('source', help='path or URL of the checkpoint')
    parser.add_argument(
        '--from', dest='format', choices=checkpoints.CHOICES, default='auto', help='format of the checkpoint'
    )
    parser.add_argument('--to', required=True, help="a config, or the name of an architecture such as 'tiny' or 's*'")
    parser.add_argument('--out', required=True, type=Path, help='path of the converted checkpoint')
    parser.add_argument(
        '--norm',
        choices=('LN', 'IN', 'GN'),
        help='normaliser of the blocks, for files of the DTN authors that do not determine it',
    )
    parser.add_argument(
        '--warm-start',
        nargs='?',
        type=float,
        const=0.999,
        metavar='LAMBDA',
        help='convert LayerNorm to DTN and set all lambdas to this value (default: 0.999)',
    )
    parser.add_argument(
        '--resize', action='store_true', help='interpolate position embeddings and bias tables to the size of the model'
    )
    parser.add_argument('--debug', action='store_true', help='show the traceback of every error')
    return parser.parse_args()


def from_config(path: str) -> Config:
    cfg = read_config(path)
    if class_of(cfg.model, MODELS) is DINO:  # only the backbone of DINO is converted
        cfg = Config(dict(model=cfg.model.backbone))
    cfg.model.get('backbone', cfg.model).init_cfg = None
    return cfg


def from_arch(args: argparse.Namespace, state: State, told: dict[str, Any]) -> Config:
    """Returns a backbone config that computes the same outputs as the model in the checkpoint."""
    theirs = split(state)[0]
    file = recognise(theirs, args.format)
    kind = FORMATS[file]
    if kind.is_own:
        raise ValueError('A file of this package needs --to CONFIG, because the tensors do not determine the config.')
    if kind.out_type is None:
        raise ValueError(f'A {file} file needs --to CONFIG, because it contains a whole model, a {kind.backbone}.')
    arch: Any = args.to
    warm_start = args.warm_start is not None
    options: dict[str, Any] = dict(norm_cfg=kind.norm_cfg, out_type=kind.out_type) | kind.settings(theirs)
    options |= {name: value for name, value in told.items() if name not in ('type', 'arch')}
    if args.norm is not None:
        options['norm_cfg'] = _choice(args.norm, kind.choices, told, file)
    elif kind.choices and not told and not warm_start:  # a warm start requires LayerNorm
        raise ValueError(
            f'The tensors of a {file} file do not determine the normaliser, because layer, insnorm and gnorm have the '
            f'same tensors. Add {" or ".join(f"--norm {name}" for name in kind.choices)}.'
        )
    has_dtn = options['norm_cfg'] is not None and options['norm_cfg']['type'] == 'DTN'
    if kind.backbone == 'PVTDTN' and not has_dtn:
        arch = dict(base=args.to, num_heads=tuple(kind.heads(f'stages.{i}.blocks.0.attn', {}) for i in range(STAGES)))
    if warm_start and not has_dtn:
        options['norm_cfg'] = dict(type='DTN', prenorm=False, eps=kind.eps('blocks.0.norm1', {}) or 1e-5)
        if kind.backbone == 'PVTDTN':
            arch |= dict(norm_heads=DTN_HEADS)
        elif kind.backbone in ('ViTDTN', 'T2TViTDTN'):
            options.setdefault('cls_from', 0)  # as in the file, the class token joins before the first block
    return Config(dict(model=dict(type=kind.backbone, arch=arch, **options)))


def _choice(said: str, choices: Mapping[str, Any], told: Mapping[str, Any], file: str) -> Any:
    """Returns the ``norm_cfg`` that ``--norm`` selects."""
    if said not in choices or (told and told['norm_cfg'] != choices[said]):
        tells = f'{told["norm_cfg"]} by the arguments in the file' if told else 'determined by the tensors'
        fits = f'Choose one of {", ".join(choices)}.' if choices and not told else 'Remove --norm.'
        raise ValueError(f'--norm {said} is not the normaliser of this {file} file. It is {tells}. {fits}')
    return choices[said]


def convert(args: argparse.Namespace) -> None:
    try:
        checkpoint = checkpoints.load(args.source)
        state, settings = checkpoints.state_of(checkpoint, args.source), checkpoints.backbone_settings(checkpoint)
        source, told = checkpoints.settings_by_arguments(checkpoint) or ('auto', {})
        args.format = source if args.format == 'auto' else args.format
        cfg = from_config(args.to) if args.to.endswith('.py') else from_arch(args, state, told)
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
    meta['cfg'] = cfg.pretty_text  # the config that the weights belong to
    checkpoints.write(args.out, dict(state_dict=converted, meta=meta))
    said = {key: value for key, value in cfg.model.get('backbone', cfg.model).items() if value is not None}
    print(f'written: {args.out}, for backbone={said}')


def main() -> None:
    args = parse_args()
    with readable_errors(args.debug):
        convert(args)


if __name__ == '__main__':
    main()
