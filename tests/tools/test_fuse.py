"""Models that tools/model_converters/fuse.py writes can be built and loaded, and give the same results in all tools."""

import re

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from mmdtn import checkpoints
from mmdtn.datasets import write_classification, write_coco
from mmdtn.models import read_config
from mmdtn.surgery.fusion import fuse, norms_of
from tests.backbones.test_all import CASES
from tests.backbones.test_folding import trained as after_training
from tests.training import write_classifier, write_detector
from tools.analysis_tools import analyze_dtn, get_flops
from tools.model_converters.fuse import main

BN = """
model['backbone'].update(
    norm_cfg=dict(_delete_=True, type="{norm}"), other_norm_cfg=dict(type="{norm}"), dtn_stages=(0, 1, 2, 3)
)
"""


def build(config):
    cfg = Config.fromfile(config)
    init_default_scope(cfg.default_scope)
    if cfg.get('data_preprocessor'):
        cfg.model.setdefault('data_preprocessor', cfg.data_preprocessor)
    return MODELS.build(cfg.model)


def trained(config, path, size=(64, 96)):
    """Saves weights as after a training, for a model whose norms have seen some batches."""
    torch.manual_seed(0)
    model = build(config)
    model.init_weights()
    for _ in range(3):
        model.backbone.train()(torch.randn(2, 3, *size))
    with torch.no_grad():
        for _, norm in norms_of(model.backbone):
            for p in norm.parameters():
                p.add_(0.3 * torch.randn_like(p))
    classes = ('checked', 'cross', 'ring', 'striped', 'triangle')
    torch.save(dict(state_dict=model.state_dict(), meta=dict(dataset_meta=dict(classes=classes))), path)
    return path


@pytest.fixture
def classifier(tmp_path):
    data = write_classification(tmp_path / 'classes', train=4, val=4)
    config = write_classifier(tmp_path / 'classifier.py', data, BN.format(norm='FeatureNorm'))
    return config, trained(config, tmp_path / 'classifier.pth'), data


def test_a_classifier(tmp_path, classifier, capsys):
    config, checkpoint, _ = classifier
    out = tmp_path / 'fused' / 'model.pth'
    main([str(config), str(checkpoint), '--out', str(out), '--shape', '32', '48', '--repeats', '1'])
    said = capsys.readouterr().out
    names = [name for name, _ in norms_of(build(config).backbone)]
    for name in names:
        assert re.search(rf'^backbone\.{re.escape(name)} +FeatureNorm +-> \S+$', said, re.M), name
    assert f'{len(names)} of {len(names)} norms fused' in said and '-> head.fc' in said
    assert float(re.search(r'outputs differ by (\S+)', said)[1]) < 1e-5
    before, after = (float(x) for x in re.search(r'(\S+) GFLOPs before, (\S+) after', said).groups())
    assert after < before
    assert re.search(r'ms before, \S+ ms after, [\d.]+x, medians of 1; CPU, \d+ threads, torch', said)

    one, other = build(config), build(out.with_suffix('.py'))
    one.load_state_dict(checkpoints.read(checkpoint))
    other.load_state_dict(checkpoints.read(out))
    x = torch.randn(2, 3, 50, 70)
    with torch.no_grad():
        torch.testing.assert_close(other.eval()(x), one.eval()(x), rtol=1e-4, atol=1e-5)
    assert get_flops.count(get_flops.counted(read_config(out.with_suffix('.py'))), (32, 48))[0] < before * 1e9
    meta = checkpoints.load(str(out))['meta']
    assert (
        meta['fused_from'] == 'classifier.pth' and 'fused=' in meta['cfg'] and len(meta['dataset_meta']['classes']) == 5
    )

    with pytest.raises(SystemExit, match=r'model\.py '):
        main([str(out.with_suffix('.py')), str(out), '--out', str(tmp_path / 'twice.pth')])
    with pytest.raises(SystemExit):
        main([str(config), str(checkpoint), '--out', str(tmp_path / 'folder')])
    with pytest.raises(SystemExit, match=r'classifier\.pth .*classifier\.pth'):
        main([str(config), str(checkpoint), '--out', str(checkpoint)])
    foreign = tmp_path / 'foreign.py'
    foreign.write_text("default_scope = 'mmpretrain'\nmodel = dict(type='mmpretrain.VGG', depth=11, num_classes=2)\n")
    torch.save(build(foreign).state_dict(), tmp_path / 'foreign.pth')
    with pytest.raises(SystemExit, match='VGG has no backbone of mmdtn'):
        main([str(foreign), str(tmp_path / 'foreign.pth'), '--out', str(tmp_path / 'none.pth')])


def test_the_eps_of_norms_that_stay_and_of_those_that_go_is_kept(tmp_path):
    backbone = dict(
        type='mmengine.ViTDTN', arch=dict(width=24, depth=2, num_heads=3, mlp_ratio=2), dtn_layers=1, cls_from=1,
        img_size=64, norm_cfg=dict(type='BN', eps=0.3), other_norm_cfg=dict(type='LN', eps=0.2),
    )  # fmt: skip
    config, checkpoint, out = (tmp_path / name for name in ('vit.py', 'vit.pth', 'fused.pth'))
    config.write_text(f"default_scope = 'mmengine'\ncustom_imports = dict(imports=['mmdtn'])\nmodel = {backbone}\n")
    one = MODELS.build(backbone)
    one.init_weights()
    torch.save(one.state_dict(), checkpoint)
    main([str(config), str(checkpoint), '--out', str(out), '--shape', '64', '64', '--repeats', '1'])
    other = build(out.with_suffix('.py'))
    other.load_state_dict(checkpoints.read(out))
    assert {m.eps for m in other.modules() if isinstance(m, torch.nn.LayerNorm)} == {0.2}
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(other.eval()(x), one.eval()(x), rtol=1e-4, atol=1e-5)


def test_a_model_of_one_size_and_channel_is_compared_there(tmp_path, capsys):
    config = tmp_path / 'levit.py'
    arch = 'dict(widths=(16, 16, 24), key_width=8, num_heads=(2, 2, 3), depths=(1, 1, 1), drop_path_rate=0.0)'
    backbone = f"dict(type='mmengine.LeViTDTN', img_size=64, in_channels=1, norm_cfg=None, arch={arch})"
    head = "dict(type='LinearClsHead', num_classes=5, in_channels=24)"
    config.write_text(
        "default_scope = 'mmpretrain'\ncustom_imports = dict(imports=['mmdtn'])\n"
        f"model = dict(type='ImageClassifier', backbone={backbone}, head={head})\n"
    )
    torch.save(build(config).state_dict(), tmp_path / 'levit.pth')
    main([str(config), str(tmp_path / 'levit.pth'), '--out', str(tmp_path / 'fused.pth'), '--repeats', '1'])
    assert '1 x 1 x 64 x 64: outputs differ by' in capsys.readouterr().out


@pytest.mark.slow
def test_the_analysis_takes_a_fused_model(tmp_path, classifier):
    config, checkpoint, data = classifier
    out = tmp_path / 'fused.pth'
    main([str(config), str(checkpoint), '--out', str(out), '--shape', '32', '32', '--repeats', '1'])
    arguments = ['--images', str(data / 'val'), '--out', str(tmp_path / 'report'), '--number', '2']
    analyze_dtn.main([str(out.with_suffix('.py')), str(out), *arguments])
    assert (tmp_path / 'report' / 'report.html').exists()


@pytest.mark.slow
def test_a_detector_finds_the_same_boxes(tmp_path):
    from mmdet.apis import DetInferencer

    coco = write_coco(tmp_path / 'coco', train=2, val=3, sides=(64, 96))
    more = BN.format(norm='BN') + "\nmodel['test_cfg'] = dict(score_thr=0.0, nms_pre=200, max_per_img=50)\n"
    config = write_detector(tmp_path / 'detector.py', coco, more)
    checkpoint = trained(config, tmp_path / 'detector.pth')
    out = tmp_path / 'fused.pth'
    main([str(config), str(checkpoint), '--out', str(out), '--shape', '50', '70', '--repeats', '1'])
    found = []
    for file, weights in ((config, checkpoint), (out.with_suffix('.py'), out)):
        inferencer = DetInferencer(str(file), str(weights), device='cpu', show_progress=False)
        found.append(inferencer(str(coco / 'val'), batch_size=1)['predictions'])
    for one, other in zip(*found, strict=True):
        assert len(one['scores']) == 50
        torch.testing.assert_close(torch.tensor(other['scores']), torch.tensor(one['scores']), rtol=1e-4, atol=1e-5)
        assert len({*map(tuple, one['bboxes'])}) > 10
    assert norms_of(inferencer.model.backbone) == []


@pytest.mark.slow
@pytest.mark.parametrize('name', ['pvt', 'pvt-2', 'swin', 'vit-class-token', 't2t', 'levit-mean'])
def test_a_fused_backbone_exports(name):
    """The export has dynamic shapes if the unfused backbone does."""
    model, _ = fuse(after_training(name, 'BN'))
    open_sizes = name.startswith(('pvt', 'swin'))
    height, width = (32 * torch.export.Dim(side, min=2, max=20) for side in ('height', 'width'))
    shape, shapes = (256, 320) if open_sizes else CASES[name].size, ({2: height, 3: width},)
    exported = torch.export.export(model, (torch.randn(1, 3, *shape),), dynamic_shapes=shapes if open_sizes else None)
    # As without fusing, torch records whether windows filled the map, but the program is valid for all maps.
    for size, check_guards in (((288, 352), True), ((288, 224), False)) if open_sizes else ((shape, True),):
        x = torch.randn(1, 3, *size)
        with torch.no_grad():
            for got, want in zip(exported.module(check_guards=check_guards)(x), model(x), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
