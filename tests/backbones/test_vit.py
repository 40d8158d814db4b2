"""ViTDTN against timm's ViT with the same weights, and what users of backbones expect."""

import pytest
import timm
import torch
from mmengine.logging import MMLogger
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mmdtn.backbones import ViTDTN
from mmdtn.backbones.vit import ARCHS
from mmdtn.checkpoints import from_timm_vit
from mmdtn.norms import DTN
from mmdtn.norms.dtn import local_start

from .helpers import randomised

LN = dict(type='LN')
SMALL = dict(
    arch=dict(width=36, depth=4, num_heads=9, mlp_ratio=2), dtn_layers=3, img_size=64, patch_size=8, drop_path_rate=0.0
)


@pytest.mark.parametrize(
    ('arch', 'peer'),
    [('t', 'vit_tiny_patch16_224'), pytest.param('s', 'vit_small_patch16_224', marks=pytest.mark.slow)],
)
@torch.no_grad()
def test_layernorm_mode_is_timms_vit(arch, peer):
    peer = randomised(timm.create_model(peer, num_classes=0, dynamic_img_size=True))
    state = from_timm_vit(peer.state_dict())
    options = dict(arch=arch, norm_cfg=LN, cls_from=0)
    classifier = ViTDTN(**options).eval()
    mean = ViTDTN(**options, out_type='avg_featmap').eval()
    maps = ViTDTN(**options, out_type='featmap', out_indices=(2, 5, -1)).eval()
    for ours in (classifier, mean, maps):
        ours.load_state_dict(state)
    for size in ((224, 224), (240, 176)):
        x = torch.randn(2, 3, *size)
        last, intermediates = peer.forward_intermediates(x, indices=[2, 5, 11])
        intermediates[-1] = last[:, 1:].transpose(1, 2).reshape(intermediates[-1].shape)  # behind the last norm
        torch.testing.assert_close(classifier(x)[0], peer(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mean(x)[0], last[:, 1:].mean(1), rtol=1e-4, atol=1e-4)
        for got, want in zip(maps(x), intermediates, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


PARAMETERS = {'t': 5.7, 't*': 5.7, 's': 22.1, 's*': 27.8, 'b': 86.5, 'b*': 86.5}


@pytest.mark.parametrize('norm', ['LN', 'DTN'])
@pytest.mark.parametrize('arch', ARCHS)
def test_parameter_counts_are_the_published_ones(arch, norm):
    with torch.device('meta'):
        model = ViTDTN(arch, norm_cfg=dict(type=norm))
    count = sum(p.numel() for p in model.parameters()) + model.num_features * 1000 + 1000
    assert count / 1e6 == pytest.approx(PARAMETERS[arch], rel=0.01)


def test_where_dtn_sits_and_where_the_class_token_joins():
    model = ViTDTN('s*')
    found = {name: (m.num_heads, m.pool_size) for name, m in model.named_modules() if isinstance(m, DTN)}
    assert found == {f'blocks.{i}.norm{n}': (9, 1) for i in range(10) for n in (1, 2)}
    assert {m.eps for m in model.modules() if isinstance(m, nn.LayerNorm)} == {1e-5}
    for cfg, eps in ((dict(type='LN'), 1e-6), (dict(type='LN', eps=1e-5), 1e-5), (dict(type='DTN', eps=1e-6), 1e-6)):
        assert {m.eps for m in ViTDTN('t', norm_cfg=cfg).modules() if isinstance(m, (nn.LayerNorm, DTN))} == {eps}
    model = ViTDTN(**SMALL)
    grids = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: grids.append(tuple(args[0].shape[1:3])))
    model(torch.zeros(1, 3, 40, 64))
    assert grids == [(5, 8), (5, 8), (5, 8), (1, 41)]


@pytest.mark.parametrize('cls_from', [0, 1, 3])
def test_where_the_class_token_is_dtn_normalises_it_alone(cls_from):
    model = randomised(ViTDTN(**dict(SMALL, dtn_layers=4), cls_from=cls_from))
    calls = []
    for block in model.blocks:
        block.norm2.register_forward_hook(lambda norm, args, y: calls.append((args, y)))
    model(torch.randn(2, 3, 40, 64))
    assert [args[0].shape for args, _ in calls] == [(2, 5, 8, 36)] * cls_from + [(2, 41, 36)] * (4 - cls_from)
    for block, ((x, *where), y) in list(zip(model.blocks, calls, strict=True))[cls_from:]:
        assert where == [(5, 8), 1]
        torch.testing.assert_close(y[:, 1:].unflatten(1, (5, 8)), block.norm2(x[:, 1:].unflatten(1, (5, 8))))


def test_position_embedding_is_for_patches_only():
    """The class token is the same whatever the position embedding, up to the block that it joins before."""
    model = ViTDTN(**SMALL)
    seen = []
    model.blocks[3].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    x = torch.randn(1, 3, 64, 64)
    model(x)
    nn.init.normal_(model.pos_embed)
    model(x)
    assert torch.equal(seen[0][:, :, 0], seen[1][:, :, 0])
    assert not torch.allclose(seen[0][:, :, 1:], seen[1][:, :, 1:])


def test_init_weights_leaves_dtns_own_start_in_place():
    model = ViTDTN(**SMALL)
    model.init_weights()
    layers = [m for m in model.modules() if isinstance(m, DTN)]
    assert len(layers) == 6
    for layer in layers:
        assert torch.equal(layer.position, torch.tensor(local_start(9)))
        assert (layer.mean_mix == 0).all() and (layer.weight == 1).all()
    assert 0.01 < model.pos_embed.std() < 0.03 and 0.01 < model.cls_token.std() < 0.03
    assert 0.01 < model.blocks[3].mlp.fc1.weight.std() < 0.03


@pytest.mark.parametrize('out_type', ['cls_token', 'avg_featmap', 'cls+mean', 'featmap'])
@pytest.mark.parametrize('size', [(64, 64), (61, 83), (7, 130)])
def test_any_size_forward_and_backward(size, out_type):
    model = ViTDTN(**SMALL, out_type=out_type)
    model.init_weights()
    (out,) = model(torch.randn(2, 3, *size))
    grid = (-(-size[0] // 8), -(-size[1] // 8))
    assert out.shape == {'featmap': (2, 36, *grid), 'cls+mean': (2, 72)}.get(out_type, (2, 36))
    assert out.is_contiguous()
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters()), 'every parameter is used'


def test_maps_of_inner_blocks_need_no_later_ones():
    whole = ViTDTN(**SMALL, out_type='featmap', out_indices=(1, -1))
    part = ViTDTN(**SMALL, out_type='featmap', out_indices=(1,))
    part.load_state_dict(whole.state_dict(), strict=False)
    x = torch.randn(1, 3, 64, 64)
    (out,) = part(x)
    torch.testing.assert_close(out, whole(x)[0])
    out.square().sum().backward()
    assert all(p.grad is not None for p in part.parameters())


@pytest.mark.parametrize('arch', ARCHS)
def test_forward_on_fake_cuda_tensors(arch):
    with FakeTensorMode(), torch.device('cuda'):
        model = ViTDTN(arch)
        for size in ((224, 224), (200, 304)):
            (out,) = model(torch.randn(1, 3, *size))
            assert out.device.type == 'cuda' and out.shape == (1, ARCHS[arch]['width'])


@torch.no_grad()
def test_class_tokens_of_several_blocks_are_those_of_timm():
    """The four class tokens of DINO's linear evaluation, each behind the final norm."""
    peer = randomised(timm.create_model('vit_tiny_patch16_224', num_classes=0))
    options = dict(arch='t', norm_cfg=LN, cls_from=0)
    last_four = ViTDTN(**options, out_indices=(-4, -3, -2, -1)).eval()
    both = ViTDTN(**options, out_type='cls+mean').eval()
    for ours in (last_four, both):
        ours.load_state_dict(from_timm_vit(peer.state_dict()))
    x = torch.randn(2, 3, 224, 224)
    found = peer.get_intermediate_layers(x, n=4, return_prefix_tokens=True, norm=True)
    for got, (_, prefix) in zip(last_four(x), found, strict=True):
        torch.testing.assert_close(got, prefix[:, 0], rtol=1e-4, atol=1e-4)
    patches, prefix = found[-1]
    want = torch.cat((prefix[:, 0], patches.mean(1)), 1)
    torch.testing.assert_close(both(x)[0], want, rtol=1e-4, atol=1e-4)


def test_class_tokens_are_only_where_the_token_is():
    model = ViTDTN(**SMALL, out_indices=(3,))
    assert [t.shape for t in model(torch.randn(2, 3, 64, 64))] == [(2, 36)]
    with pytest.raises(ValueError, match='before block 3'):
        ViTDTN(**SMALL, out_indices=(2, 3))
    (early,) = ViTDTN(**SMALL, cls_from=1, out_indices=(1,))(torch.randn(2, 3, 64, 64))
    assert early.shape == (2, 36)


def test_all_stages_frozen_leave_nothing_to_train():
    model = ViTDTN(**SMALL, frozen_stages=4).train()
    assert not any(p.requires_grad for p in model.parameters())
    assert not model.norm.training and not any(block.training for block in model.blocks)
    almost = ViTDTN(**SMALL, frozen_stages=3).train()
    assert almost.cls_token.requires_grad and almost.norm.weight.requires_grad


def test_frozen_stages_hold_still():
    model = ViTDTN(**SMALL, frozen_stages=2).train()
    still = {'.'.join(name.split('.')[:2]) for name, p in model.named_parameters() if not p.requires_grad}
    assert still == {'patch_embed.weight', 'patch_embed.bias', 'pos_embed', 'blocks.0', 'blocks.1'}
    assert not model.blocks[1].training and model.blocks[2].training


def test_pretrained_classifier_gives_a_backbone_of_maps_and_logs_what_it_left(tmp_path):
    classifier = ViTDTN(**SMALL)
    classifier.init_weights()
    state = {f'backbone.{k}': v for k, v in classifier.state_dict().items()} | {'head.fc.weight': torch.zeros(3, 36)}
    torch.save(dict(state_dict=state), tmp_path / 'classifier.pth')
    log = tmp_path / 'log.txt'
    MMLogger.get_instance('pretrained-vit', log_file=str(log))
    init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'classifier.pth'), prefix='backbone.')
    model = ViTDTN(**SMALL, out_type='featmap', init_cfg=init_cfg)
    model.init_weights()
    for name, p in model.named_parameters():
        assert torch.equal(p, classifier.state_dict()[name]), name
    text = log.read_text()
    assert 'dropped cls_token: the target has no such part' in text and 'keeps its initial value' not in text


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (dict(arch='huge'), r"arch='huge'.*'s\*'"),
        (dict(arch=dict(base='s', dephts=1)), 'dephts.*depth'),
        (dict(arch=dict(width=36)), 'lacks.*depth'),
        (dict(out_type='raw'), "out_type='raw'.*cls_token.*avg_featmap.*featmap"),
        (dict(out_indices=(12,), out_type='featmap'), r'out_indices=\(12,\)'),
        (dict(dtn_layers=13), 'dtn_layers=13'),
        (dict(dtn_layers=12), 'cannot join before block 12.*cls_from=0.*avg_featmap'),
    ],
)
def test_options_that_make_no_model(options, words):
    with pytest.raises(ValueError, match=words):
        ViTDTN(**options)
