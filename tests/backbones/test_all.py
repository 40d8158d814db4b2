"""Behaviour that all backbones have in common."""

from typing import Any, NamedTuple

import pytest
import torch
from mmengine.optim import build_optim_wrapper
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import mmdtn.backbones
from mmdtn.backbones import PVTDTN, LeViTDTN, SwinDTN, T2TViTDTN, ViTDTN
from mmdtn.norms import DTN
from mmdtn.norms.dtn import local_start

from .helpers import randomised


class Case(NamedTuple):
    """A small model for each kind of output, and the size of its images."""

    backbone: type[nn.Module]
    options: dict[str, Any]
    size: tuple[int, int] = (64, 96)


PVT = dict(base='tiny', depths=(1, 1, 1, 1), widths=(16, 32, 40, 64), mlp_ratios=(2, 2, 2, 2))
VIT = dict(
    arch=dict(width=36, depth=4, num_heads=9, mlp_ratio=2), dtn_layers=3, img_size=64, patch_size=8
)  # fmt: skip
T2T: dict[str, Any] = dict(arch=dict(base='t-14', width=48, depth=4, num_heads=3), dtn_layers=3)
LEVIT = dict(
    arch=dict(widths=(16, 32, 48), key_width=8, num_heads=(2, 3, 4), depths=(1, 1, 1), drop_path_rate=0.0),
    img_size=(64, 96),
)
SWIN = dict(arch=dict(base='tiny', width=16, depths=(1, 1, 2, 1), num_heads=(1, 2, 4, 8)))
CASES = {
    'pvt': Case(PVTDTN, dict(arch=PVT)),
    'pvt-class-token': Case(PVTDTN, dict(arch=PVT, out_type='cls_token')),
    'pvt-2': Case(PVTDTN, dict(arch=dict(PVT, version=2))),
    'swin': Case(SwinDTN, SWIN),
    'swin-mean': Case(SwinDTN, dict(SWIN, out_type='avg_featmap')),
    'vit': Case(ViTDTN, dict(VIT, out_type='featmap')),
    'vit-class-token': Case(ViTDTN, VIT),
    'vit-class-token-first': Case(ViTDTN, dict(VIT, dtn_layers=4, cls_from=0)),
    'vit-rpe': Case(ViTDTN, dict(VIT, rpe=True)),
    'pvt-rpe': Case(PVTDTN, dict(arch=PVT, rpe=True)),
    'levit': Case(LeViTDTN, dict(LEVIT, out_type='featmap')),
    'levit-mean': Case(LeViTDTN, LEVIT),
    't2t': Case(T2TViTDTN, dict(T2T, out_type='featmap')),
    't2t-class-token': Case(T2TViTDTN, T2T),
    't2t-performer': Case(T2TViTDTN, dict(T2T, arch=dict(T2T['arch'], performer=True), dtn_layers=4, cls_from=0)),
}


def small(name: str, **options: Any) -> nn.Module:
    case = CASES[name]
    return case.backbone(**dict(case.options, drop_path_rate=0.0) | options)


def images(name: str, number: int = 2) -> torch.Tensor:
    return torch.randn(number, 3, *CASES[name].size)


def test_no_backbone_is_left_out():
    assert {case.backbone.__name__ for case in CASES.values()} == set(mmdtn.backbones.__all__)


@pytest.mark.parametrize('name', CASES)
def test_every_parameter_is_used(name):
    model = small(name)
    model.init_weights()
    outs = model(images(name))
    assert all(out.is_contiguous() for out in outs if out.dim() == 4)
    sum(out.square().sum() for out in outs).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []


@pytest.mark.parametrize('name', CASES)
@torch.no_grad()
def test_features_of_an_image_do_not_depend_on_its_batch(name):
    model = randomised(small(name))
    x = images(name, 3)
    for alone, together in zip(model(x[1:2]), model(x), strict=True):
        torch.testing.assert_close(alone, together[1:2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('name', CASES)
def test_init_weights_leaves_dtns_own_start_in_place(name):
    model = small(name)
    model.init_weights()
    layers = [m for m in model.modules() if isinstance(m, DTN)]
    assert layers
    for layer in layers:
        start = torch.tensor(local_start(layer.num_heads))
        assert torch.equal(layer.position[: len(start)], start)
        assert (layer.mean_mix == 0).all() and (layer.weight == 1).all()


@pytest.mark.parametrize('name', CASES)
def test_forward_on_fake_cuda_tensors(name):
    with FakeTensorMode(), torch.device('cuda'):
        assert all(out.device.type == 'cuda' for out in small(name)(images(name)))


@pytest.mark.parametrize('training', [False, True], ids=['eval', 'train'])
@pytest.mark.parametrize('norm', ['DTN', 'BN', 'SN'])
@pytest.mark.parametrize('name', CASES)
def test_checkpointing_changes_neither_gradients_nor_statistics(name, norm, training):
    plain, again = (small(name, with_cp=with_cp, norm_cfg=dict(type=norm)).train(training) for with_cp in (False, True))
    again.load_state_dict(plain.state_dict())
    x = images(name)
    for model in (plain, again):
        torch.manual_seed(0)
        sum(out.square().sum() for out in model(x)).backward()
    for (key, a), b in zip(plain.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=key)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(again.state_dict()[key], value, msg=key)


@pytest.mark.parametrize('name', CASES)
def test_frozen_stages_hold_still_and_take_in_one_another(name):
    everything = {n for n, _ in small(name).named_parameters()}
    still = []
    for frozen_stages in (-1, 0, 1, 2):
        model = small(name, frozen_stages=frozen_stages).train()
        still.append({n for n, p in model.named_parameters() if not p.requires_grad})
        parts = [part for part in model.frozen_parts() if isinstance(part, nn.Module)] if frozen_stages >= 0 else []
        assert model.training and not any(part.training for part in parts)
    assert still[0] == set() and set() < still[1] < still[2] < still[3] < everything


def everywhere(name: str, norm: str) -> dict[str, Any]:
    """Returns arguments that use one kind of norm everywhere. Some backbones have no ``other_norm_cfg``."""
    others = {} if CASES[name].backbone is LeViTDTN else dict(other_norm_cfg=dict(type=norm))
    return dict(norm_cfg=dict(type=norm), **others)


@pytest.mark.parametrize('norm', ['BN', 'FeatureNorm', 'GN'])
@pytest.mark.parametrize('name', CASES)
def test_every_norm_can_be_another(name, norm):
    model = small(name, **everywhere(name, norm))
    model.init_weights()
    assert not [m for m in model.modules() if isinstance(m, (nn.LayerNorm, DTN))]
    sum(out.square().sum() for out in model(images(name))).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []


@pytest.mark.parametrize('name', CASES)
def test_another_norm_has_the_name_of_the_layernorm_in_its_place(name):
    """IN has the same parameters as LayerNorm, so a checkpoint of one can be loaded into the other."""
    ln, other = (small(name, **everywhere(name, norm)) for norm in ('LN', 'IN'))
    other.load_state_dict(ln.state_dict())


@pytest.mark.parametrize('kind', ['DTN', DTN])
@pytest.mark.parametrize('name', [n for n in CASES if 'other_norm_cfg' in everywhere(n, 'LN')])
def test_dtn_stays_in_the_blocks(name, kind):
    with pytest.raises(ValueError, match=r'other_norm_cfg has type=.*DTN'):
        small(name, other_norm_cfg=dict(type=kind))


@pytest.mark.parametrize('name', CASES)
def test_norms_and_embeddings_are_not_drawn_towards_zero(name):
    from mmengine.config import Config

    from ..configs.test_recipes import CONFIGS

    model = small(name)
    no_decay = Config.fromfile(CONFIGS / '_base_' / 'no_decay.py').no_decay
    wrapper = build_optim_wrapper(
        model,
        dict(
            optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.05),
            paramwise_cfg=dict(bias_decay_mult=0.0, flat_decay_mult=0.0, **no_decay),
        ),
    )
    decay = {id(p): group['weight_decay'] for group in wrapper.optimizer.param_groups for p in group['params']}
    spared = {id(p) for m in model.modules() if isinstance(m, DTN) for p in m.parameters()}
    ends = ('pos_embed', 'cls_token', 'cls_pos', 'relative_position_bias_table', 'attention_biases', 'rpe.position')
    for n, p in model.named_parameters():
        assert (decay[id(p)] == 0) == (p.dim() == 1 or id(p) in spared or n.endswith(ends)), n


@pytest.mark.parametrize('norm', ['DTN', 'LN'])
@pytest.mark.parametrize('name', CASES)
def test_builds_in_every_scope(name, norm):
    import mmdet.registry
    import mmengine.registry
    import mmpretrain.registry

    backbone, options, _ = CASES[name]
    for package in (mmengine, mmdet, mmpretrain):
        model = package.registry.MODELS.build(dict(options, type=backbone.__name__, norm_cfg=dict(type=norm)))
        assert isinstance(model, backbone)


class FullPrecisionDTN(DTN):
    """Norm whose output autocast casts in front of each layer that uses it."""

    def forward(self, *args: Any, feeds_autocast: bool = False) -> torch.Tensor:
        return super().forward(*args)


class CastDTN(FullPrecisionDTN):
    """Norm that casts its output itself."""

    def forward(self, *args: Any, feeds_autocast: bool = False) -> torch.Tensor:
        return super().forward(*args).to(torch.bfloat16)


@pytest.mark.parametrize('name', CASES)
def test_half_precision_of_norms_is_that_of_a_cast(name):
    """The output of a norm in half precision is bitwise equal to what autocast makes of its float32 output."""
    x = torch.randn(2, 3, *CASES[name].size, requires_grad=True)
    outputs, gradients = {}, {}
    for norm in (DTN, FullPrecisionDTN, CastDTN):
        torch.manual_seed(0)
        model = small(name, norm_cfg=dict(type=norm)).eval()
        model.init_weights()
        dtypes = set()
        for module in model.modules():
            if isinstance(module, DTN):
                module.register_forward_hook(lambda module, inputs, output, seen=dtypes: seen.add(output.dtype))
        with torch.autocast('cpu', torch.bfloat16):
            outs = outputs[norm] = model(x)
        loss = sum(out.float().square().sum() for out in outs)
        gradients[norm] = torch.autograd.grad(loss, [x, *model.parameters()])
        assert norm is FullPrecisionDTN or dtypes == {torch.bfloat16}
    assert all(map(torch.equal, outputs[DTN], outputs[FullPrecisionDTN]))
    assert all(map(torch.equal, gradients[DTN], gradients[CastDTN]))
