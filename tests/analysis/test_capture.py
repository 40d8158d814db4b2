"""Recording tokens does not change the model or its outputs."""

import pytest
import torch
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.registry import MODELS, init_default_scope
from torch import nn

from mmdtn.analysis import Capture, attention_distance
from mmdtn.backbones import PVTDTN, LeViTDTN, SwinDTN, T2TViTDTN, ViTDTN
from mmdtn.backbones.layers import Block, normalise
from tests.configs.helpers import image_and_objects
from tests.training import write_detector

SMALL_PVT = dict(base='tiny', depths=(1, 1, 1, 1), widths=(16, 32, 40, 64), mlp_ratios=(2, 2, 2, 2))
BACKBONES = {
    'pvt': lambda **kwargs: PVTDTN(SMALL_PVT, **kwargs),
    'swin': lambda **kwargs: SwinDTN(
        dict(width=24, depths=(2, 1, 2, 1), num_heads=(1, 2, 3, 3), drop_path_rate=0.0, norm_heads=(1, 2, 3, 3)),
        **kwargs,
    ),
    'vit': lambda **kwargs: ViTDTN(dict(width=24, depth=4, num_heads=3, mlp_ratio=2), dtn_layers=2, **kwargs),
    'vit with its class token first': lambda **kwargs: ViTDTN(
        dict(width=24, depth=4, num_heads=3, mlp_ratio=2), dtn_layers=4, cls_from=0, **kwargs
    ),
    't2t': lambda **kwargs: T2TViTDTN(dict(base='t-14', width=24, depth=4, num_heads=3), dtn_layers=2, **kwargs),
    'levit': lambda **kwargs: LeViTDTN(
        dict(base='128s', widths=(16, 32, 48), key_width=8, num_heads=(2, 3, 4)), img_size=(80, 112), **kwargs
    ),
}


@pytest.mark.parametrize('family', BACKBONES)
@pytest.mark.parametrize('norm', ['DTN', 'LN'])
def test_the_output_is_the_same_to_the_bit(family, norm):
    model = BACKBONES[family](norm_cfg=dict(type=norm)).eval()
    x = torch.randn(2, 3, 80, 112)
    with torch.no_grad():
        alone = model(x)
        with Capture(model) as capture:
            watched = model(x)
        distances = [attention_distance(block) for block in capture.blocks]
        after = model(x)
    assert all(a.equal(b) and a.equal(c) for a, b, c in zip(alone, watched, after, strict=True))
    assert all(not module._forward_hooks for module in model.modules())
    assert len(capture.blocks) == sum(isinstance(module, Block) for module in model.modules())
    assert all((d.by_head > 0).all() and d.uniform > 0 for d in distances)
    with torch.no_grad():  # with gradients, torch uses another attention kernel
        for seen in capture.blocks:
            grid = seen.grid if seen.has_class_token else None
            for name in ('norm1', 'norm2'):
                norm = seen.block.get_submodule(name)
                assert normalise(norm, seen.before[name], grid).equal(seen.after[name])
            assert seen.block(seen.before['norm1'], grid).equal(seen.output)


def test_hooks_go_also_when_the_model_fails():
    model = BACKBONES['pvt']()
    with pytest.raises(RuntimeError), Capture(model):
        model(torch.randn(1, 4, 32, 32))
    assert all(not module._forward_hooks for module in model.modules())


def test_a_detector_predicts_the_same(tmp_path):
    cfg = Config.fromfile(write_detector(tmp_path / 'detector.py', tmp_path))
    init_default_scope(cfg.default_scope)
    model = MODELS.build(cfg.model).eval()
    image, sample = image_and_objects(64, 96)
    with torch.no_grad():
        (alone,) = model.test_step(pseudo_collate([dict(inputs=image, data_samples=sample)]))
        alone = alone.pred_instances.clone()
        with Capture(model) as capture:
            (watched,) = model.test_step(pseudo_collate([dict(inputs=image, data_samples=sample)]))
    assert len(alone) and alone.bboxes.equal(watched.pred_instances.bboxes)
    assert alone.scores.equal(watched.pred_instances.scores)
    assert [seen.name for seen in capture.blocks] == [f'backbone.stages.{i}.blocks.0' for i in range(4)]
    assert [seen.grid for seen in capture.blocks] == [(16, 24), (8, 12), (4, 6), (2, 3)]


def test_a_model_of_others_is_told_apart():
    with pytest.raises(ValueError, match='Linear has no block of PVTDTN, SwinDTN'):
        Capture(nn.Linear(2, 2))
