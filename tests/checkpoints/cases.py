"""All published formats and sizes, each with a file, a reference implementation and the arguments of convert.py.

``python -m tests.checkpoints.cases`` prints the largest difference in float64 for each case. This takes minutes.
"""

import argparse
import itertools
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from mmengine.registry import MODELS
from torch import Tensor

from mmdtn import checkpoints
from mmdtn.backbones.base import Backbone
from mmdtn.dvt import DVT
from tools.model_converters import convert

from ..dvt import oracle
from ..dvt import published as dvt
from . import arithmetic, files
from .arithmetic import Norm, State
from .published import AuthorsDTN

Outputs = Tensor | list[Tensor]
DTN_HEADS = (4, 4, 5, 8)


@dataclass
class Case:
    name: str
    state: Callable[[], State]
    compute: Callable[[Tensor, State], Outputs]
    to: tuple[str, ...]  # --to and what follows
    says: tuple[str, ...] = ()  # what the command has to print
    side: int = 224
    published: Callable[[State], State] = lambda state: state  # the names in the file, from those of the arithmetic
    training: dict[str, Any] | None = None  # arguments of the training script, if they are in the file
    large: bool = False


def converted(file: dict[str, Any], folder: Path, *arguments: str) -> tuple[Backbone, str]:
    """Returns the model that ``convert.py FILE --to ARGUMENTS`` writes, in float64, and the output of the command."""
    source, out = folder / 'theirs.pth', folder / 'ours.pth'
    torch.save(file, source)
    with redirect_stdout(StringIO()) as said:
        with mock.patch.object(sys, 'argv', ['convert.py', str(source), '--to', *arguments, '--out', str(out)]):
            convert.main()
        settings = checkpoints.backbone_settings(checkpoints.load(str(out)))
        assert settings is not None
        model = MODELS.build(dict(settings, init_cfg=dict(type='Pretrained', checkpoint=str(out))))
        model.init_weights()
    return model.eval().double(), said.getvalue()


def images(side: int = 224) -> Tensor:
    return torch.randn(1, 3, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def largest_difference(case: Case, folder: Path) -> tuple[float, str]:
    """Returns the largest difference from the reference implementation, and the output of the command."""
    state = case.state()
    file: dict[str, Any] = dict(state_dict=case.published(state))
    if case.training is not None:
        file['args'] = Namespace(**case.training)
    model, said = converted(file, folder, *case.to)
    expected = case.compute(images(case.side), double(state))
    expected = expected if isinstance(expected, list) else [expected]
    outputs = zip(model(images(case.side)), expected, strict=True)
    return max((got - want).abs().max().item() for got, want in outputs), said


def double(state: State) -> State:
    return {key: value.double() if value.is_floating_point() else value for key, value in state.items()}


def authors_norm(heads: int, side: int = 14, pool: int = 1, only_var: bool = False) -> Norm:
    """Returns the dense DTN of the authors with the tensors of one layer."""

    def norm(x: Tensor, state: State, name: str) -> Tensor:
        layer = AuthorsDTN(x.shape[-1], heads, side, pool).double()
        layer.shift = layer.shift.double()
        own = {key.removeprefix(f'{name}.'): value for key, value in state.items() if key.startswith(f'{name}.')}
        if only_var:  # the mean is LayerNorm's: a lambda of exactly 1
            own['mean_norm_weight'] = torch.full((heads,), 100.0, dtype=torch.float64)
        layer.load_state_dict(own)
        return layer(x)

    return norm


def of_kind(kind: str, heads: int, side: int = 14, pool: int = 1) -> Norm:
    """Returns a norm by its name in the DTN authors' code."""
    norms: dict[str, Norm] = dict(insnorm=arithmetic.insnorm, scale=arithmetic.scale, batch=arithmetic.batch)
    norms |= dict(gnorm=arithmetic.gnorm(heads), power=arithmetic.power(heads))
    return norms.get(kind) or authors_norm(heads, side, pool, only_var=kind == 'dtn_var')


def of_stage(kind: str, stage: int) -> Norm:
    return of_kind(kind, DTN_HEADS[stage - 1], 112 // 2**stage, (4, 2, 1)[stage - 1])


VITS = {'t': (192, 3), 't*': (192, 4), 's': (384, 6), 's*': (432, 9), 'b': (768, 12), 'b*': (768, 16)}
NORM = {'layer': 'LN', 'insnorm': 'IN', 'gnorm': 'GN'}


def authors_vit(size: str, kind: str, inside: int = 10, training: dict[str, Any] | None = None) -> Case:
    width, heads = VITS[size]
    own = None if kind == 'layer' else of_kind(kind, heads)
    compute = partial(arithmetic.vit, heads=heads, eps=1e-5, cls_from=inside, inside=own)
    state = partial(files.vit, width, kind=kind, heads=heads, inside=inside)
    to = (size,) if kind not in NORM or training else (size, '--norm', NORM[kind])
    says = ("'other_norm_cfg': {'type': 'LN', 'eps': 1e-05}", f"'cls_from': {inside}")
    said = f', {inside} blocks' if inside != 10 else ''
    name = f'DTN authors, ViT-{size.upper()}, {kind}{said}{" (arguments)" if training else ""}'
    return Case(name, state, compute, to, says, training=training, large=size != 't*')


def authors_plain_vit(size: str) -> Case:
    width, heads = VITS[size]
    compute = partial(arithmetic.plain_vit, heads=heads)
    name = f'DTN authors, ViT-{size.upper()} with the class token from the start'
    return Case(name, partial(files.plain_vit, width), compute, (size, '--norm', 'LN'), large=size != 't')


def authors_pvt(size: str, kind: str, training: dict[str, Any] | None = None) -> Case:
    own = None if kind == 'layer' else partial(of_stage, kind)
    compute = partial(arithmetic.pvt, heads=DTN_HEADS, inside=own)
    to = (size,) if kind not in NORM or training else (size, '--from', 'dtn', '--norm', NORM[kind])
    name = f'DTN authors, PVT-{size}, {kind}{" (arguments)" if training else ""}'
    state = partial(files.pvt, PVTS[size], kind)
    says = () if kind.startswith('dtn') else ("'num_heads': (4, 4, 5, 8)",)
    return Case(name, state, compute, to, says, training=training, large=size != 'tiny')


def mmpretrains_vit(size: str) -> Case:
    case = timms_vit(size)
    names = partial(files.mmpretrains, blocks='layers', norm='ln1')
    return replace(case, name=f'MMPretrain, DeiT-{size.upper()}', published=names)


def timms_vit(size: str, **options: Any) -> Case:
    width, heads = VITS[size]
    compute = partial(arithmetic.vit, heads=heads, eps=1e-6)
    pixels = options.get('patch', 16) * options.get('side', 14)
    said = f', {options["patch"]} px patches' if 'patch' in options else ''
    name = f'timm, DeiT-{size.upper()}{said}{f" at {pixels} px" if pixels != 224 else ""}'
    state = partial(files.vit, width, bias=True, **options)
    return Case(name, state, compute, (size,), side=pixels, large=size != 't' or pixels > 224)


PVTS = dict(tiny=(2, 2, 2, 2), small=(3, 4, 6, 3), medium=(3, 4, 18, 3), large=(3, 8, 27, 3))
SECOND = dict(b0=(2, 2, 2, 2), b1=(2, 2, 2, 2), b2=(3, 4, 6, 3), b3=(3, 4, 18, 3), b4=(3, 8, 27, 3), b5=(3, 6, 40, 3))


def pvts() -> Iterator[Case]:
    for size, depths in PVTS.items():
        state, large = partial(files.pvt, depths), size != 'tiny'
        yield Case(f'whai362, PVT-{size}', state, arithmetic.pvt, (size,), ('--from dtn',), large=large)
    as_maps = partial(arithmetic.pvt, eps=(1e-6, 1e-6), maps=True)
    yield Case('MMDetection, PVT-tiny', files.pvt, as_maps, ('tiny',), published=files.mmdets_pvt)
    for size, depths in SECOND.items():
        widths = (32, 64, 160, 256) if size == 'b0' else files.WIDTHS
        ratios = (4, 4, 4, 4) if size == 'b5' else (8, 8, 4, 4)
        state = partial(files.pvt, depths, widths=widths, ratios=ratios, second=True)
        large = size != 'b0'
        yield Case(f'whai362, PVTv2-{size}', state, arithmetic.pvt, (size,), large=large)
        yield Case(f'timm, PVTv2-{size}', state, arithmetic.pvt, (size,), published=files.timms_pvt, large=large)
        yield Case(f'MMDetection, PVTv2-{size}', state, as_maps, (size,), published=files.mmdets_pvt, large=large)


SWINS: dict[str, tuple[int, Sequence[int], Sequence[int]]] = dict(
    tiny=(96, (2, 2, 6, 2), (3, 6, 12, 24)),
    small=(96, (2, 2, 18, 2), (3, 6, 12, 24)),
    base=(128, (2, 2, 18, 2), (4, 8, 16, 32)),
)


def swins() -> Iterator[Case]:
    for size, arch in SWINS.items():
        state, large = partial(files.swin, *arch), size != 'tiny'
        compute = partial(arithmetic.swin, heads=arch[2])
        for whose, names in (
            ('Microsoft', lambda state: state),
            ('timm', files.timms_swin),
            ('MMPretrain', files.mms_swin),
        ):
            yield Case(f'{whose}, Swin-{size}', state, compute, (size,), published=names, large=large)
        in_detector = partial(lambda arch: files.with_norms_of_maps(files.swin(*arch)), arch)
        compute = partial(arithmetic.swin, heads=arch[2], maps=True)
        name = f'MMDetection, Swin-{size}'
        yield Case(name, in_detector, compute, (size,), published=files.mms_swin, large=large)


LEVITS = {
    '128s': ((128, 256, 384), 16, (4, 6, 8), (2, 3, 4)),
    '128': ((128, 256, 384), 16, (4, 8, 12), (4, 4, 4)),
    '192': ((192, 288, 384), 32, (3, 5, 6), (4, 4, 4)),
    '256': ((256, 384, 512), 32, (4, 6, 8), (4, 4, 4)),
    '384': ((384, 512, 768), 32, (6, 9, 12), (4, 4, 4)),
}


def levits() -> Iterator[Case]:
    for size, (widths, key_width, heads, depths) in LEVITS.items():
        state = partial(files.levit, widths, key_width, heads, depths)
        compute = partial(arithmetic.levit, key_width=key_width, heads=heads, depths=depths)
        for whose, names in (
            ('authors', lambda state, depths: state),
            ('timm', files.timms_levit),
            ('MMPretrain', files.mmpretrains_levit),
        ):
            published, large = partial(names, depths=depths), size != '128s'
            yield Case(f'{whose}, LeViT-{size}', state, compute, (size,), published=published, large=large)


T2TS = {
    '7': (256, 7, 4, 2),
    '10': (256, 10, 4, 2),
    '12': (256, 12, 4, 2),
    '14': (384, 14, 6, 3),
    '14-resnext': (384, 14, 32, 3),
    '14-wide': (768, 4, 12, 3),
    '19': (448, 19, 7, 3),
    '24': (512, 24, 8, 3),
    't-14': (384, 14, 6, 3),
    't-19': (448, 19, 7, 3),
    't-24': (512, 24, 8, 3),
}
LEARNED = (torch.randn(1, 197, 256, generator=torch.Generator().manual_seed(2)) * 256).round() / 4096


def t2ts() -> Iterator[Case]:
    for size, (width, depth, heads, ratio) in T2TS.items():
        state = partial(files.t2t, width, depth, ratio, performer=not size.startswith('t-'))
        compute = partial(arithmetic.t2t, heads=heads)
        yield Case(f'authors, T2T-ViT-{size}', state, compute, (size,), large=size not in ('7', '14-resnext'))
        if size.startswith('t-'):  # MMPretrain has no performers
            names = partial(files.mmpretrains, blocks='encoder', norm='norm')
            large = size != 't-14'
            yield Case(f'MMPretrain, T2T-ViT-{size}', state, compute, (size,), published=names, large=large)
    small = partial(arithmetic.t2t, heads=4)
    for name, table, side, says in (
        ('sines at 288 px', files.sines(325, 256), 288, "'img_size': 288"),
        ('resized to 288 px', files.resized(files.sines(197, 256), 18), 288, "'learned_positions': True"),
        ('learned positions', LEARNED, 224, "'learned_positions': True"),
    ):
        yield Case(f'authors, T2T-ViT-7, {name}', partial(files.t2t, table=table), small, ('7',), (says,), side)
    un = partial(files.t2t, kind='un')
    yield Case('UN authors, T2T-ViT-7', un, small, ('7',), ("'other_norm_cfg': {'type': 'UN'}",))
    un = partial(files.t2t, 384, 14, 3, kind='un')
    yield Case('UN authors, T2T-ViT-14', un, partial(arithmetic.t2t, heads=6), ('14',), large=True)
    training = dict(model='t2t_vit_14_resnext')
    state, compute = partial(files.t2t, 384, 14, 3), partial(arithmetic.t2t, heads=32)
    name = 'authors, T2T-ViT-14-resnext (arguments)'
    yield Case(name, state, compute, ('14-resnext',), training=training, large=True)


KINDS = ('layer', 'insnorm', 'gnorm', 'scale', 'batch', 'power', 'dtn', 'dtn_var')
CASES = [
    *(authors_vit(size, kind) for kind in KINDS for size in VITS if size != 't' or kind == 'layer'),
    *(authors_vit('t*', kind, inside=8) for kind in ('dtn', 'scale')),
    *(
        authors_vit('t*', kind, inside, dict(model='vit_norm_ti_star', norm_type=kind, local_up_to_layer=inside))
        for kind, inside in (('layer', 6), ('insnorm', 10), ('gnorm', 10))
    ),
    *map(authors_plain_vit, VITS),
    *(authors_pvt(size, kind.replace('dtn', 'dtn_pool')) for kind in KINDS[:-1] for size in PVTS),
    authors_pvt('tiny', 'gnorm', dict(model='pvt_tiny_norm', norm_type='gnorm')),
    *map(timms_vit, ('t', 's', 'b')),
    *map(mmpretrains_vit, ('t', 's', 'b')),
    *(timms_vit('t', patch=8, side=14), timms_vit('t', side=24)),
    *pvts(),
    *swins(),
    *levits(),
    *t2ts(),
]


@torch.no_grad()
def largest_difference_of_dvt(name: str, reuse: str) -> float:
    """Returns the largest difference of all logits from an independent implementation."""
    model = DVT(name, reuse_features=dvt.REUSES[reuse][0], reuse_relations=dvt.REUSES[reuse][1]).double().eval()
    file = dvt.weights(dvt.MODELS[name], *dvt.REUSES[reuse])
    model.load_state_dict(checkpoints.translate(file, model)[0])
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # of the oracle's own matrices
    try:
        expected = oracle.cascade(double(file), images(), dvt.MODELS[name].heads)
    finally:
        torch.set_default_dtype(before)
    return max((got - want).abs().max().item() for got, want in zip(model(images()), expected, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--small', action='store_true', help='leave out large models')
    parser.add_argument('--only', default='', help='part of the names of files')
    args = parser.parse_args()
    print('| file | largest difference |\n|---|---|')
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            if args.only in case.name and not (args.small and case.large):
                print(f'| {case.name} | {largest_difference(case, Path(folder))[0]:.1e} |', flush=True)
    for name, reuse in itertools.product(dvt.MODELS, dvt.REUSES):
        row = f'authors, DVT {name}, reuse: {reuse}'
        if args.only in row and not args.small:
            print(f'| {row} | {largest_difference_of_dvt(name, reuse):.1e} |', flush=True)


if __name__ == '__main__':
    main()
