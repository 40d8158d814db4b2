"""Tests of the conversion of models from timm, MMDetection, MMPretrain and torchvision."""

import copy
import json
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
import torch.multiprocessing as mp
import torchvision
from mmengine.registry import MODELS
from timm.models.metaformer import Attention, LayerNorm2dNoBias, LayerNormNoBias, MetaFormer, SepConv
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2

import mmdtn
from mmdtn import checkpoints, convert_norms
from mmdtn.backbones import SwinDTN
from mmdtn.checkpoints import from_mmdet_swin
from mmdtn.datasets import write_coco
from mmdtn.engine.launch import leave_together
from mmdtn.norms import DTN, TokenNorm
from mmdtn.norms.dtn import local_start, mix_of
from tests.backbones.helpers import randomised
from tests.training import log_of, write_detector
from tools.train import main as train


def vit(**options):
    small = dict(img_size=64, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5, dynamic_img_size=True)
    return timm.create_model('vit_tiny_patch16_224', **small | options)


def mmdet_swin():
    return MODELS.build(
        dict(type='mmdet.SwinTransformer', embed_dims=24, depths=(1, 1, 2, 1), num_heads=(1, 2, 4, 8), drop_path_rate=0)
    )


MAKE = {
    'vit': (lambda: vit(global_pool='avg'), (64, 64), (72, 104)),
    'vit with registers': (lambda: vit(reg_tokens=4), (64, 64), (72, 104)),
    'pvt': (
        lambda: MODELS.build(
            dict(type='mmdet.PyramidVisionTransformer', embed_dims=8, num_layers=[1] * 4, num_heads=[1, 2, 2, 2])
        ),
        (224, 224),
        (130, 203),
    ),
    'pvt 2': (
        lambda: timm.create_model('pvt_v2_b0', embed_dims=(8, 16, 24, 32), num_heads=(1, 2, 2, 2), depths=[1] * 4),
        (224, 224),
        (161, 97),
    ),
    'swin': (mmdet_swin, (224, 224), (167, 230)),
    'convnext': (
        lambda: timm.create_model('convnext_atto', dims=(8, 16, 24, 32), depths=[1] * 4),
        (224, 224),
        (96, 160),
    ),
    'mmpretrain convnext': (
        lambda: MODELS.build(
            dict(
                type='mmpretrain.ConvNeXt',
                arch=dict(depths=[1] * 4, channels=[8, 16, 24, 32]),
                out_indices=(0, 1, 2, 3),
            )
        ),
        (224, 224),
        (96, 160),
    ),
    'mmpretrain vit': (
        lambda: MODELS.build(
            dict(
                type='mmpretrain.VisionTransformer',
                arch=dict(embed_dims=24, num_layers=2, num_heads=3, feedforward_channels=48),
                img_size=64,
                patch_size=8,
                out_type='avg_featmap',
            )
        ),
        (64, 64),
        (72, 104),
    ),
}


def make(name):
    build, size, unseen = MAKE[name]
    return randomised(build()), size, unseen


def tensors(outputs):
    return [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor)]


def images(size, number=2):
    return torch.randn(number, 3, *size, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
@pytest.mark.parametrize('name', MAKE)
@torch.no_grad()
def test_at_lambda_one_the_model_computes_what_it_did_at_any_size(name):
    model, size, unseen = make(name)
    before, state = copy.deepcopy(model), model.state_dict()
    report = convert_norms(model, size, warm_start=1.0)
    assert unseen not in report.sizes and len(report.sizes) == 3
    layers = {n: m for n, m in model.named_modules() if isinstance(m, DTN)}
    assert {*layers} == {*report.converted} and layers
    for x in (images(size), images(unseen)):
        for got, want in zip(tensors(model(x)), tensors(before(x)), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    new = {key for n in layers for key in (f'{n}.mean_mix', f'{n}.var_mix', f'{n}.position')}
    assert model.state_dict().keys() == state.keys() | new
    assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())


@pytest.mark.slow
@pytest.mark.parametrize('name', MAKE)
def test_every_layernorm_is_in_the_report_once_and_every_new_parameter_gets_a_gradient(name):
    model, size, _ = make(name)
    norms = {n for n, m in model.named_modules() if isinstance(m, nn.LayerNorm)}
    report = convert_norms(model, size)
    assert {*report.converted} | {*report.kept} == norms and not {*report.converted} & {*report.kept}
    assert all(
        report.details().count(f'\n  {n}: ') + report.details().count(f'\n  {n} is not converted') == 1 for n in norms
    )
    for layer in (m for m in model.modules() if isinstance(m, DTN)):
        start = torch.tensor(local_start(layer.num_heads))
        assert torch.equal(layer.position[: len(start)], start)
        assert torch.allclose(layer.mean_mix.sigmoid(), torch.tensor(0.999)) and torch.equal(
            layer.mean_mix, layer.var_mix
        )
    model.train()
    sum(t.square().sum() for t in tensors(model(images(size)))).backward()
    parameters = {n: p for n, p in model.named_parameters() if n.rpartition('.')[0] in report.converted}
    assert len(parameters) == 5 * len(report.converted)
    none = [n for n, p in parameters.items() if p.grad is None or not p.grad.any()]
    if name == 'vit with registers':  # the output is the class token, which the last MLP does not mix with other tokens
        assert none == [f'blocks.1.norm2.{p}' for p in ('mean_mix', 'var_mix', 'position')]
    else:
        assert none == []


@pytest.mark.slow
def test_where_dtn_goes_with_which_heads_and_pools():
    def layers(name):
        model, size, _ = make(name)
        convert_norms(model, size)
        return {n: (m.num_heads, m.pool_size) for n, m in model.named_modules() if isinstance(m, DTN)}

    assert layers('vit') == {f'blocks.{i}.norm{n}': (3, 1) for i in range(2) for n in (1, 2)}
    swin = {(0, 0): (1, 4), (1, 0): (2, 2), (2, 0): (4, 1), (2, 1): (4, 1), (3, 0): (8, 1)}
    assert layers('swin') == {f'stages.{i}.blocks.{j}.norm{n}': v for (i, j), v in swin.items() for n in (1, 2)}
    pvt = {0: (1, 4), 1: (2, 2), 2: (2, 1), 3: (2, 1)}
    assert layers('pvt') == {f'layers.{i}.1.1.norm{n}': v for i, v in pvt.items() for n in (1, 2)}
    assert layers('convnext') == {f'stages.{i}.blocks.0.norm': (1, pvt[i][1]) for i in range(4)}


@torch.no_grad()
def test_a_converted_mmdet_swin_is_swin_dtn():
    model = randomised(mmdet_swin())
    convert_norms(model)
    for layer in model.modules():
        if isinstance(layer, DTN):
            for p in (layer.mean_mix, layer.var_mix, layer.position):
                p.normal_(0, 0.5)
    ours = SwinDTN(
        dict(base='tiny', width=24, depths=(1, 1, 2, 1), num_heads=(1, 2, 4, 8), norm_heads=(1, 2, 4, 8)),
        norm_cfg=dict(type='DTN', prenorm=False),
    ).eval()
    ours.load_state_dict(from_mmdet_swin(model.state_dict()))
    for size in ((224, 224), (140, 200)):
        for got, want in zip(model(images(size)), ours(images(size)), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_tokens_in_another_order_are_refused():
    model = timm.create_model('hiera_tiny_224', embed_dim=8, num_heads=1, stages=(2, 2, 2, 2))
    report = convert_norms(model)
    assert {*report.converted} == {'blocks.7.norm1', 'blocks.7.norm2'}, 'these tokens form one window'
    refused = [n for n, why in report.kept.items() if 'in another order than row by row: ' in why]
    assert refused == [f'blocks.{i}.norm{n}' for i in (0, 1, 3, 5) for n in (1, 2)]


@pytest.mark.parametrize(
    ('make', 'number'),
    [
        (
            lambda: MetaFormer(
                depths=[1] * 4,
                dims=(8, 16, 32, 32),
                token_mixers=[SepConv, SepConv, Attention, Attention],
                norm_layers=[LayerNorm2dNoBias] * 2 + [LayerNormNoBias] * 2,
            ),
            8,
        ),  # this model has a learned residual scale
        (
            lambda: torchvision.models.SwinTransformer(
                (4, 4), 12, [1, 1], [1, 2], (4, 4), block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2
            ),
            4,
        ),  # norms follow attention
        (
            lambda: timm.create_model(
                'tiny_vit_5m_224', embed_dims=(8, 16, 32, 32), num_heads=(1, 1, 1, 1), depths=(1, 1, 1, 1)
            ),
            3,
        ),  # the parent module adds the shortcut
        (
            lambda: MODELS.build(
                dict(
                    type='mmpretrain.HorNet',
                    arch=dict(
                        base_dim=8, depths=[1] * 4, orders=[2, 2, 2, 2], dw_cfg=[dict(type='DW', kernel_size=7)] * 4
                    ),
                )
            ),
            8,
        ),  # the model has its own LayerNorm class
    ],
    ids=['caformer', 'swin_v2', 'tiny_vit', 'hornet'],
)
def test_blocks_of_many_kinds_are_found(make, number):
    model = randomised(make())
    model.eval()
    before = copy.deepcopy(model)
    report = convert_norms(model, warm_start=1.0)
    assert len(report.converted) == number, report.details()
    for got, want in zip(tensors(model(images((224, 224)))), tensors(before(images((224, 224)))), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


class Ways(nn.Module):
    """A residual block, next to norms that cannot be converted for various reasons."""

    def __init__(self, channels=16, shuffle=False):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, channels, 8, 8)
        self.another_name = self.patch_embed
        self.block = nn.TransformerEncoderLayer(channels, 4, 32, norm_first=True, batch_first=True, dropout=0.0)
        self.windows, self.twice, self.never = (nn.LayerNorm(channels) for _ in range(3))
        self.odd = Odd(channels)
        self.final = nn.LayerNorm(channels)
        self.rms, self.batch = nn.RMSNorm(channels), nn.BatchNorm2d(channels)
        self.shuffle = shuffle

    def forward(self, x):
        x = self.batch(self.patch_embed(x)).flatten(2).mT
        if self.shuffle:
            x = x.flip(1)
        x = self.block(x)
        windows = self.windows(x.unflatten(1, (4, -1)).flatten(0, 1)).view(x.shape)
        x = x + self.rms(windows + self.twice(x)[:, :1] + self.twice(x[:, :8]).mean(1, keepdim=True) + self.odd(x))
        return nn.functional.layer_norm(self.final(x.mean(1)), x.shape[-1:])


class Odd(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x) * 2


def test_what_stays_and_why():
    model = Ways()
    report = convert_norms(model, (64, 96))
    model.batch.eval()
    training = model(images((64, 96)))
    torch.testing.assert_close(model.eval()(images((64, 96))), training)  # torch reads the norms' eps here
    assert {*report.converted} == {'block.norm1', 'block.norm2'}
    expected = dict(
        windows='in the batch dimension: 8 x 24 x 16 for 2 images',
        twice='several shapes in one run',
        never='is not called',
        odd='does not compute LayerNorm over the channels: its input is 2 x 96 x 16',
        final='no tokens on a grid: its input is 2 x 16',
    )
    assert report.kept.keys() == expected.keys()
    assert all(words in report.kept[name] for name, words in expected.items())
    assert report.others == {'rms': 'RMSNorm', 'batch': 'BatchNorm2d', '': 'F.layer_norm, called by the module itself'}
    assert 'of 8 x 12 tokens, the one at' in convert_norms(Ways(shuffle=True), (64, 96)).kept['block.norm1']
    assert 'has a grid of 4 x 8 tokens: at least 7' in convert_norms(Ways(), (32, 64)).kept['block.norm1']


def test_a_norm_with_two_names_is_replaced_under_both():
    model = vit()
    model.blocks[0].again = model.blocks[0].norm1
    convert_norms(model, (64, 64))
    assert isinstance(model.blocks[0].again, DTN) and model.blocks[0].again is model.blocks[0].norm1


def test_include_and_exclude():
    assert {*convert_norms(vit(), (64, 64), include='norm1').converted} == {'blocks.0.norm1', 'blocks.1.norm1'}
    report = convert_norms(vit(), (64, 64), include=[r'^norm$', r'blocks\.0'], exclude=r'norm2$')
    assert {*report.converted} == {'blocks.0.norm1', 'norm'}
    assert report.kept['blocks.0.norm2'] == 'is excluded' and report.kept['blocks.1.norm1'] == 'is not included'
    with pytest.raises(ValueError, match=r"'ln_1' .*LayerNorm.*\['blocks"):
        convert_norms(vit(), (64, 64), include='ln_1')
    with pytest.raises(ValueError, match=r"'\(' .*position 0"):
        convert_norms(vit(), (64, 64), include='(')


@pytest.mark.parametrize('name', ['vit', 'mmpretrain convnext'])
@pytest.mark.parametrize('kind', ['IN', 'GN', 'BN', 'RMSNorm', 'DyT'])
def test_a_sibling_takes_the_places_of_dtn(name, kind):
    model, size, unseen = make(name)
    dtn = convert_norms(copy.deepcopy(model), size)
    report = convert_norms(model, size, norm_cfg=dict(type=kind))
    assert report.converted.keys() == dtn.converted.keys()
    norms = {n: m for n, m in model.named_modules() if isinstance(m, TokenNorm)}
    assert norms.keys() == report.converted.keys()
    model.train()
    sum(t.square().sum() for t in tensors(model(images(unseen)))).backward()
    assert all(p.grad is not None for norm in norms.values() for p in norm.parameters())
    if kind == 'IN':  # compare with torch's instance norm on the same input
        first = next(iter(norms.values()))
        x = torch.randn(2, 9, 5, first.num_features)
        want = nn.functional.instance_norm(x.permute(0, 3, 1, 2), weight=first.weight, bias=first.bias, eps=first.eps)
        torch.testing.assert_close(first.normalise(x), want.permute(0, 2, 3, 1), rtol=1e-4, atol=1e-4)


def test_a_norm_without_bias_keeps_none_and_what_is_frozen_stays_frozen():
    model = vit()
    model.blocks[0].norm1 = nn.LayerNorm(24, bias=False)
    model.blocks[0].norm2 = nn.LayerNorm(24, elementwise_affine=False)
    model.blocks[1].norm1.requires_grad_(False)
    model.blocks[1].norm2.eps = 1e-3
    before = copy.deepcopy(model).eval()
    convert_norms(model.eval(), (64, 64), warm_start=1.0)
    first, second = model.blocks
    assert not first.norm1.bias.requires_grad and not first.norm1.bias.any() and first.norm1.weight.requires_grad
    assert first.norm2.weight is None and not second.norm1.weight.requires_grad and second.norm1.mean_mix.requires_grad
    assert second.norm2.settings.eps == 1e-3
    torch.testing.assert_close(model(images((64, 64))), before(images((64, 64))), rtol=1e-5, atol=1e-5)


def test_the_model_is_left_as_it_was_found():
    model = Ways()
    model.train()
    model.block.self_attn.eval()
    state = copy.deepcopy(model.state_dict())
    training = {n: m.training for n, m in model.named_modules()}
    generator = torch.get_rng_state()
    convert_norms(model, (64, 96), exclude='.')
    assert torch.equal(torch.get_rng_state(), generator)
    assert {n: m.training for n, m in model.named_modules()} == training
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_copies_pickles_and_states_of_a_converted_model():
    model, size, unseen = make('vit')
    convert_norms(model, size)
    want = model(images(unseen))
    fresh, _, _ = make('vit')
    convert_norms(fresh, size)
    nn.init.normal_(fresh.blocks[0].norm1.position)
    fresh.load_state_dict(model.state_dict())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), fresh):
        assert torch.equal(other(images(unseen)), want)
        assert torch.equal(model(images(size)), other(images(size))), 'the copies must not share the size of the image'


def test_mixed_precision_and_half_precision():
    model, size, _ = make('vit')
    convert_norms(model, size)
    want = model(images(size))
    with torch.autocast('cpu', torch.bfloat16):
        got = model(images(size))
    torch.testing.assert_close(got.float(), want, rtol=0.1, atol=0.1)
    half = vit().eval().bfloat16()
    convert_norms(half, size)
    assert half.blocks[0].norm1.weight.dtype == torch.bfloat16
    assert half(images(size).bfloat16()).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize('name', ['vit', 'convnext'])
def test_a_compiled_model_has_no_more_graphs_than_it_had(name):
    """The model is part of another model. Otherwise, torch would also compile the hook that stores the size."""
    model, size, unseen = make(name)
    number = []
    for again in (False, True):
        torch._dynamo.reset()
        if again:
            convert_norms(model, size)
        counter = CompileCounter()
        compiled = torch.compile(nn.Sequential(model), backend=counter, fullgraph=True, dynamic=True)
        for x in (images(size), images(unseen), images((size[0], unseen[1]))):
            torch.testing.assert_close(compiled(x), model(x))
        number.append(counter.frame_count)
    assert number[1] <= number[0]
    alone = torch.compile(model, backend='eager', fullgraph=True, dynamic=True)
    torch.testing.assert_close(alone(images(unseen)), model(images(unseen)))


@pytest.mark.slow
def test_an_exported_model_keeps_its_open_sizes():
    model = randomised(Checkpointed())
    convert_norms(model, (64, 64))
    height, width = (8 * torch.export.Dim(name, min=4, max=20) for name in ('height', 'width'))
    program = torch.export.export(model, (images((56, 72), 1),), dynamic_shapes=({2: height, 3: width},))
    assert 'mmdtn' not in str(program.graph)
    x = images((96, 80), 1)
    torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-4)


def test_other_sizes_of_a_model_that_takes_one():
    model = vit(dynamic_img_size=False).eval()
    report = convert_norms(model, (64, 64))
    assert report.sizes == [(64, 64)] and 'only size' in str(report) and len(report.converted) == 4
    with pytest.raises(ValueError, match=r'72 x 64.*64 x 64'):
        model(images((72, 64)))
    assert model(images((64, 64))).isfinite().all()


def test_a_size_that_is_none():
    with pytest.raises(ValueError, match=r'example_size=32: give \(height, width\)'):
        convert_norms(vit(), 32)


@torch.no_grad()
def test_methods_that_start_from_images():
    model, size, unseen = make('vit')
    before = copy.deepcopy(model)
    convert_norms(model, size, warm_start=1.0)
    with pytest.raises(ValueError, match='65 tokens, but no image'):
        model.blocks(torch.randn(2, 65, 24))
    for x in (images(size), images(unseen)):
        for method in ('forward_features', 'forward_intermediates', 'get_intermediate_layers', '__call__'):
            got, want = (tensors(getattr(m, method)(x)) for m in (model, before))
            for one, other in zip(got, want, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match='65 tokens, but no image'):
        model.blocks(torch.randn(2, 65, 24))


def test_methods_with_activation_checkpointing_and_another_image_before_the_backward_pass():
    model = randomised(vit()).train()
    convert_norms(model, (64, 64))
    gradients = []
    for checkpointing in (False, True):
        model.set_grad_checkpointing(checkpointing)
        model.zero_grad()
        sum(model.forward_features(images(size)).square().sum() for size in ((64, 96), (80, 80))).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want)


def test_sizes_of_a_model_that_changed():
    model, size, _ = make('vit')
    convert_norms(model, size)
    model.patch_embed.proj.stride = 4
    with pytest.raises(ValueError, match=r'8 x 8 .*64 x 64.*226'):
        model(images(size))


class Asking(nn.Module):
    """Model that takes a dict, and raises an error unless ``interpolate`` is True."""

    def __init__(self):
        super().__init__()
        self.vit = vit()

    def forward(self, inputs, interpolate=False):
        if not interpolate:
            raise ValueError('interpolate')
        return self.vit(inputs['image'])


def test_a_model_that_takes_more_than_images():
    model = Asking()
    with pytest.raises(ValueError, match='call=lambda model, images'):
        convert_norms(model, (64, 64))
    report = convert_norms(model, (64, 64), call=lambda model, images: model(dict(image=images), interpolate=True))
    assert len(report.converted) == 4 and len(report.sizes) == 3
    assert model(dict(image=images((72, 96))), interpolate=True).isfinite().all()


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, words):
        (_, _) = words.shape
        return self.norm(self.embed(words))


def test_models_that_cannot_be_converted_say_why():
    with pytest.raises(ValueError, match='not an image model'):
        convert_norms(Text())
    with torch.device('meta'):
        empty = vit()
    with pytest.raises(ValueError, match=r'meta device.*to_empty'):
        convert_norms(empty, (64, 64))
    report = convert_norms(vit(patch_drop_rate=0.5), (64, 64))
    assert report.converted == {}
    assert '2 x 33 x 24, not 2 x 65 x 24' in report.kept['blocks.0.norm1']


class Hybrid(nn.Module):
    """Model with one block on tokens in row order, and one block on tokens in column order."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, 16, 8, 8)
        self.right, self.turned = (
            nn.TransformerEncoderLayer(16, 4, 32, norm_first=True, batch_first=True, dropout=0.0) for _ in range(2)
        )

    def forward(self, x):
        x = self.embed(x)
        y = self.right(x.flatten(2).mT).mT.reshape(x.shape)
        return self.turned(y.mT.flatten(2).mT)


def test_the_summary_has_five_lines_and_a_dict_has_everything():
    report = convert_norms(Ways(), (64, 96))
    summary = str(report).splitlines()
    assert len(summary) == 5 and '2 of 7 LayerNorm' in summary[0] and '64 x 96' in summary[0]
    hybrid = Hybrid()
    report_in_part = convert_norms(hybrid, (64, 64))
    assert {*report_in_part.converted} == {'right.norm1', 'right.norm2'}
    headline = str(report_in_part).splitlines()[0]
    assert '2 of 4 LayerNorm' in headline and '2 in residual blocks not converted' in headline
    everything = json.loads(json.dumps(report.to_dict()))
    assert everything['kept'] == report.kept and everything['converted'].keys() == report.converted.keys()
    assert everything['converted']['block.norm1']['grid'] == [8, 12]


def test_a_model_that_cannot_be_run_says_why():
    with pytest.raises(ValueError, match=r'2 x 3 x 60 x 64.*example_size'):
        convert_norms(vit(dynamic_img_size=False), (60, 64))
    gray = vit(in_chans=1)
    with pytest.raises(ValueError, match='2 x 3 x 64 x 64'):
        convert_norms(gray, (64, 64))
    assert len(convert_norms(gray, (1, 64, 64)).converted) == 4


@pytest.mark.parametrize(
    ('norm_cfg', 'warm_start', 'words'),
    [
        (dict(type='DTN'), 0.999, 'prenorm=False'),
        (dict(type='DTN', prenorm=False, mean_lambda=0.5), 0.999, 'both lambdas learned'),
        (dict(type='DTN', prenorm=False), 1.5, r'warm_start=1\.5'),
        (dict(type='DTN', prenorm=False), 'a', "warm_start='a'.* from 0 to 1"),
        (dict(type='DTN', prenorm=False), True, 'warm_start=True.* from 0 to 1'),
        (dict(type='DTN', prenorm=False, num_heads=5), 0.999, 'num_heads=5 does not divide num_features=24'),
        (dict(type=torch.nn.BatchNorm2d), 0.999, 'channels last'),
    ],
)
def test_options_that_make_no_norm_leave_the_model_alone(norm_cfg, warm_start, words):
    model = vit()
    with pytest.raises((ValueError, KeyError), match=words):
        convert_norms(model, (64, 64), norm_cfg=norm_cfg, warm_start=warm_start)
    assert not any(isinstance(m, DTN) for m in model.modules())


def test_dtn_from_its_own_start_and_numbers_that_are_said():
    model = vit()
    convert_norms(model, (64, 64), norm_cfg=dict(type='DTN'), warm_start=None, num_heads=4, pool_size=2)
    layer = model.blocks[0].norm1
    assert layer.settings.prenorm and (layer.num_heads, layer.pool_size) == (4, 2) and not layer.mean_mix.any()


class Checkpointed(nn.Module):
    """ViT with activation checkpointing for all blocks."""

    def __init__(self):
        super().__init__()
        self.vit = vit(num_classes=0, global_pool='avg', depth=1)

    def forward(self, x):
        tokens = self.vit._pos_embed(self.vit.patch_embed(x))
        for block in self.vit.blocks:
            tokens = checkpoint(block, tokens, use_reentrant=False) if self.training else block(tokens)
        return tokens.mean(1)


@pytest.mark.parametrize('how', ['mmdet', 'timm'])
def test_a_model_that_checkpoints_its_blocks_already(how):
    if how == 'timm':
        model = vit()
        model.set_grad_checkpointing(True)
    else:
        model = MODELS.build(dict(type='mmdet.SwinTransformer', embed_dims=24, num_heads=(1, 2, 4, 8), with_cp=True))
    plain = copy.deepcopy(model)
    for module in plain.modules():
        module.with_cp = module.grad_checkpointing = False
    size = (64, 64) if how == 'timm' else (224, 224)
    assert convert_norms(model, size).converted.keys() == convert_norms(plain, size).converted.keys() != set()
    checkpointed = [
        m for m in model.modules() if getattr(m, 'with_cp', False) or getattr(m, 'grad_checkpointing', False)
    ]
    assert len(checkpointed) > 0, 'the conversion restores activation checkpointing'


def test_portrait_and_landscape_in_two_threads():
    """Both images have the same number of tokens, and each thread uses the size of its own image."""
    model = randomised(vit()).eval()
    convert_norms(model, (64, 64))
    sizes = [(64, 96), (96, 64)]
    with torch.no_grad():
        expected = [model(images(size)) for size in sizes]
    inside = threading.Barrier(2)

    def meet(*_):
        inside.wait(60)

    model.patch_embed.register_forward_hook(meet)

    @torch.no_grad()
    def run(size):
        return model(images(size))

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, sizes))
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)


def test_activation_checkpointing_with_one_size_and_with_two_in_flight():
    model = randomised(Checkpointed())
    convert_norms(model, (64, 64))

    def gradients(*sizes):
        model.zero_grad()
        sum(model(images(size)).square().sum() for size in sizes).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for sizes in ([(64, 96)], [(96, 64)], [(64, 64), (96, 96)]):
        want = gradients(*sizes)
        model.train()
        for got, expected in zip(gradients(*sizes), want, strict=True):
            torch.testing.assert_close(got, expected)
        model.eval()
    model.train()
    with pytest.raises(ValueError, match=r'12 x 8 or 8 x 12.*before one backward pass'):
        gradients((64, 96), (96, 64))


def test_it_is_there_at_the_top():
    assert mmdtn.convert_norms is convert_norms


def _train_two_steps(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group('gloo', f'file://{folder}/meet', rank=rank, world_size=2)
    torch.save(_state_after_two_steps(rank), f'{folder}/{rank}.pt')
    leave_together()  # after the wrapper is deleted, because torch can hang if a wrapper outlives the group


def _state_after_two_steps(rank):
    torch.manual_seed(rank)
    model = vit()
    convert_norms(model, (64, 64))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for size in ((64, 64), (72, 96)):
        optimizer.zero_grad()
        parallel(torch.randn(2, 3, *size)).square().sum().backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.slow
def test_two_processes_stay_alike(tmp_path):
    mp.spawn(_train_two_steps, (str(tmp_path),), nprocs=2)
    one, other = (torch.load(tmp_path / f'{rank}.pt') for rank in range(2))
    assert all(torch.equal(value, other[key]) for key, value in one.items())
    assert any(key.endswith('position') for key in one)


CONVERTED = """
model['backbone'] = dict(
    _delete_=True,
    type='ConvertedBackbone',
    warm_start=0.9,
    backbone=dict(type='PyramidVisionTransformer', embed_dims=8, num_layers=[1] * 4, num_heads=[1, 2, 4, 8]),
)
model['neck']['in_channels'] = [8, 16, 32, 64]
train_cfg = dict(max_epochs=1)
"""


@pytest.mark.slow
def test_a_detector_with_a_converted_backbone_trains_by_the_command_line(tmp_path):
    data = write_coco(tmp_path / 'data', 4, 2)
    train([str(write_detector(tmp_path / 'config.py', data, CONVERTED)), '--work-dir', str(tmp_path / 'work')])
    state = checkpoints.read(tmp_path / 'work' / 'epoch_1.pth')
    mixes = {key: value for key, value in state.items() if key.endswith('_mix')}
    assert {key.rpartition('.')[0] for key in mixes} == {
        f'backbone.layers.{i}.1.1.norm{n}' for i in range(4) for n in (1, 2)
    }
    moved = torch.cat([(value - mix_of(0.9)).abs() for value in mixes.values()])
    assert moved.median() > 1e-6, 'the lambdas moved, although two small steps may partly cancel out'
    assert 'Epoch(val) [1]' in log_of(tmp_path / 'work')
