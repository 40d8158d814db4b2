"""Runs the analysis tools as a user does, on small untrained models."""

import csv
import json
from html.parser import HTMLParser
from pathlib import Path

import mmcv
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import InstanceData
from PIL import Image

from mmdtn import models
from mmdtn.analysis import look
from mmdtn.datasets import write_classification, write_coco
from mmdtn.errors import UserError
from mmdtn.reports import figures
from mmdtn.reports.enlarge import enlarge
from tests.training import write_classifier, write_detector
from tools.analysis_tools import analyze_dtn, browse_dataset, compare_runs

SWIN = dict(width=24, depths=(1, 1, 1, 1), num_heads=(1, 2, 3, 3), norm_heads=(1, 2, 3, 3), drop_path_rate=0.0)


class Page(HTMLParser):
    """Parses a page and checks that its elements are closed and that it loads nothing from outside the file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.titles: list[str] = []
        self.text = ''
        self.feed(path.read_text(encoding='utf-8'))
        assert self.open == [] and 'script' not in self.text

    def handle_starttag(self, tag, attributes):
        if tag not in ('img', 'meta', 'link'):
            self.open.append(tag)
        attributes = dict(attributes)
        self.sources += [attributes[name] for name in ('src', 'href') if name in attributes]
        if tag == 'img':
            assert attributes['alt']

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] == 'h2':
            self.titles.append(data)


def save(config: Path, path: Path) -> Path:
    cfg = Config.fromfile(config)
    init_default_scope(cfg.get('default_scope', 'mmengine'))
    torch.manual_seed(0)
    torch.save(MODELS.build(cfg.model).state_dict(), path)
    return path


def run(*arguments) -> Page:
    out = Path(arguments[-1])
    analyze_dtn.main([str(a) for a in arguments])
    page = Page(out / 'report.html')
    assert all(source.startswith('data:') for source in page.sources), 'nothing to be fetched'
    pictures = sorted(out.glob('*.png'))
    assert len([s for s in page.sources if s.startswith('data:image/png')]) == len(pictures)
    for picture in pictures:
        assert Image.open(picture).width == 1200
        assert len(read(picture.with_suffix('.csv'))) > 0
    return page


def read(path: Path) -> list[dict]:
    with path.open(newline='') as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope='module')
def shapes(tmp_path_factory):
    root = write_coco(tmp_path_factory.mktemp('data') / 'shapes', train=2, val=3, sides=(64, 96))
    path = root / 'annotations' / 'instances_val.json'
    content = json.loads(path.read_text())
    content['annotations'] = [a for a in content['annotations'] if a['image_id'] != 1]
    path.write_text(json.dumps(content))
    return root


@pytest.mark.slow
def test_two_detectors_side_by_side_and_an_image_without_objects(shapes, tmp_path):
    dtn = write_detector(tmp_path / 'with_dtn.py', shapes)
    ln = tmp_path / 'with_ln.py'
    ln.write_text("_base_ = './with_dtn.py'\nmodel = dict(backbone=dict(norm_cfg=dict(_delete_=True, type='LN')))\n")
    layer = 'dtn/backbone.stages.0.blocks.0.norm1'
    heads = [(f'{layer}/{kind}/{head}', head) for kind in ('lambda_mean', 'lambda_var') for head in (0, 1)]
    log = [{name: 0.5 + step / 100 + head / 10 for name, head in heads} | dict(step=step) for step in (5, 10)]
    (tmp_path / 'scalars.json').write_text('\n'.join(map(json.dumps, [dict(loss=1.0, step=1), *log])))
    out = tmp_path / 'out'
    page = run(
        dtn, save(dtn, tmp_path / 'dtn.pth'), '--images', shapes / 'annotations' / 'instances_val.json',
        '--against', ln, save(ln, tmp_path / 'ln.pth'), '--log', tmp_path / 'scalars.json',
        '--out', out,
    )  # fmt: skip
    assert 'Left out' not in page.titles
    assert 'no annotated objects' in page.text
    assert {row['model'] for row in read(out / 'attention_distance.csv')} == {'with_dtn', 'with_ln'}
    assert {row['images'] for row in read(out / 'attention_distance.csv')} == {'3'}
    kinds = {(row['model'], row['statistics']) for row in read(out / 'variation_coefficient.csv')}
    assert ('with_dtn', 'DTN') in kinds and ('with_ln', 'DTN') not in kinds and ('with_ln', 'IN') in kinds
    assert {row['model'] for row in read(out / 'lambda.csv')} == {'with_dtn'}
    curve = [r for r in read(out / 'lambda_over_training.csv') if r['quantity'] == 'lambda_var' and r['head'] == '1']
    assert [(r['iteration'], r['lambda']) for r in curve] == [('5', '0.65'), ('10', '0.7')]


SCOPED = """
_scopes = dict(LoadImageFromFile='mmengine', LoadAnnotations='mmdet', Resize='mmdet', PackDetInputs='mmdet')
for _step in test_dataloader['dataset']['pipeline']:
    _step['type'] = _scopes[_step['type']] + '.' + _step['type']
"""


@pytest.mark.slow
def test_a_detector_on_a_folder_without_annotations(shapes, tmp_path):
    config = write_detector(tmp_path / 'detector.py', shapes)
    out = tmp_path / 'out'
    page = run(
        config, save(config, tmp_path / 'it.pth'), '--images', shapes / 'val', '--number', '1', '--out', out
    )  # fmt: skip
    assert 'no annotated objects' not in page.text
    rows = read(out / 'where_it_looks.csv')
    assert {row['image'] for row in rows} == {'000001.jpg'}
    sides = Image.open(shapes / 'val' / '000001.jpg').size[::-1]
    finest = next(row['what'] for row in rows if row['what'].startswith('magnitude after'))
    places = [tuple(map(int, row['where'].split())) for row in rows if row['what'] == finest]
    scaled = [round(side * 96 / max(sides)) for side in sides]
    assert [max(axis) + 1 for axis in zip(*places, strict=True)] == [-(-side // 4) for side in scaled], 'no padding'
    assert min(scaled) <= 92, 'but there was some'


@pytest.mark.parametrize('more', ['', SCOPED], ids=['name', 'scope'])
def test_loading_of_annotations_is_left_out_however_it_is_named(shapes, tmp_path, more):
    config = write_detector(tmp_path / 'detector.py', shapes, more)
    model = models.load(str(config), str(save(config, tmp_path / 'it.pth')))
    (seen,) = look.look(model, look.choose_images(model, str(shapes / 'val'), 1))
    assert seen.name == '000001.jpg' and not seen.sample.gt_instances


@pytest.mark.slow
def test_a_single_image_for_a_classifier_without_dtn(tmp_path):
    data = write_classification(tmp_path / 'data', train=5, val=1)
    config = write_classifier(
        tmp_path / 'plain.py', data, "model['backbone'].update(norm_cfg=dict(_delete_=True, type='LN'))\n"
    )
    out = tmp_path / 'out'
    page = run(config, save(config, tmp_path / 'plain.pth'), '--images', data / 'val', '--out', out)
    assert 'a single image' in page.text
    assert 'DTN layers of model 1none' in page.text
    assert 'Lambda of each head: None' in page.text
    assert 'P of one query token (Figs. 7, 8): None' in page.text
    assert 'Lambda over training (Fig. 4): No log' in page.text
    assert {row['std_over_images'] for row in read(out / 'attention_distance.csv')} == {'0'}
    assert not list(out.glob('lambda*')) and not list(out.glob('neighbourhood*'))


@pytest.mark.slow
def test_a_bare_backbone_on_a_folder(shapes, tmp_path):
    config = tmp_path / 'swin.py'
    config.write_text(f"custom_imports = dict(imports=['mmdtn'])\nmodel = dict(type='SwinDTN', arch={SWIN})\n")
    out = tmp_path / 'out'
    page = run(
        config, save(config, tmp_path / 'swin.pth'), '--images', shapes / 'val', '--number', '2', '--out', out
    )  # fmt: skip
    assert 'bare backbone' in page.text
    for path in out.glob('neighbourhood*.csv'):
        rows = read(path)
        assert sum(float(r['trained']) for r in rows if r['head'] == '0') == pytest.approx(1, abs=1e-4)
    distances = read(out / 'attention_distance.csv')
    assert float(distances[0]['uniform_tokens']) == pytest.approx(windows_of_seven(), rel=1e-4)


@pytest.mark.slow
def test_the_teacher_of_dino_is_looked_at(shapes, tmp_path):
    """The transforms are those that its config has for k-NN."""
    config, out = tmp_path / 'mine.py', tmp_path / 'out'
    config.write_text(f"_base_ = '{Path(__file__).parents[2]}/configs/dino/dino_vit-mini-dtn_cifar10.py'\n")
    page = run(config, save(config, tmp_path / 'dino.pth'), '--images', shapes / 'val', '--number', '2', '--out', out)
    rows = read(out / 'class_attention.csv')
    assert len({row['image'] for row in rows}) == 2 and 0 < sum(float(row['attention']) for row in rows) < 2 * 4
    assert {row['layer'].partition('.')[0] for row in read(out / 'lambda.csv')} == {'teacher'}
    assert 'What the class token attends to' in page.text


CONVERTED = """
custom_imports = dict(imports=['mmdtn', 'mmpretrain.models'])
model = dict(type='ConvertedBackbone', example_size=(64, 64), backbone=dict({backbone}))
"""
BACKBONES = dict(
    vit="type='mmpretrain.VisionTransformer', img_size=224, patch_size=16, out_type='avg_featmap',"
    'arch=dict(embed_dims=24, num_layers=2, num_heads=3, feedforward_channels=48)',
    convnext="type='mmpretrain.ConvNeXt', arch=dict(depths=[1] * 4, channels=[8, 16, 24, 32])",
)


@pytest.mark.slow
@pytest.mark.parametrize('name', BACKBONES)
def test_a_converted_backbone(shapes, tmp_path, name):
    config = tmp_path / f'{name}.py'
    size = dict(vit=(224, 224), convnext=(256, 256))[name]
    config.write_text(CONVERTED.format(backbone=BACKBONES[name]).replace('(64, 64)', str(size)))
    out = tmp_path / 'out'
    page = run(
        config, save(config, tmp_path / 'it.pth'), '--images', shapes / 'val', '--number', '2', '--out', out
    )  # fmt: skip
    layers = dict(vit=4, convnext=4)[name]
    assert f'DTN layers of model 1{layers}' in page.text and 'Attention distance' in page.text
    assert len({row['layer'] for row in read(out / 'lambda.csv')}) == layers
    assert all(float(row['lambda_var']) == pytest.approx(0.999) for row in read(out / 'lambda.csv'))
    grids = {(row['row'], row['column']) for row in read(out / 'token_magnitudes.csv')}
    assert len(grids) == dict(vit=14 * 14, convnext=56 * 56)[name]
    assert {row['statistics'] for row in read(out / 'variation_coefficient.csv')} == {'LN', 'IN', 'DTN'}


def windows_of_seven() -> float:
    places = np.array([(y, x) for y in range(7) for x in range(7)])
    return float(np.linalg.norm(places[:, None] - places[None], axis=-1).mean())


@pytest.mark.parametrize(
    ('images', 'message'),
    [
        ('nowhere', '--images nowhere .* train, val, test'),
        ('val', '--images val'),
    ],
)
def test_what_cannot_be_shown_is_told(images, message, tmp_path):
    config = tmp_path / 'swin.py'
    config.write_text(f"custom_imports = dict(imports=['mmdtn'])\nmodel = dict(type='SwinDTN', arch={SWIN})\n")
    checkpoint = save(config, tmp_path / 'swin.pth')
    with pytest.raises(SystemExit, match=message):
        analyze_dtn.main([str(config), str(checkpoint), '--images', images, '--out', str(tmp_path / 'out')])
    assert not (tmp_path / 'out').exists()


def test_a_checkpoint_of_another_model_is_told(tmp_path):
    config = tmp_path / 'swin.py'
    config.write_text(f"custom_imports = dict(imports=['mmdtn'])\nmodel = dict(type='SwinDTN', arch={SWIN})\n")
    torch.save(dict(weight=torch.ones(1)), tmp_path / 'other.pth')
    with pytest.raises(SystemExit, match=r'other.pth does not fit .*swin.py: Missing key'):
        analyze_dtn.main([str(config), str(tmp_path / 'other.pth'), '--images', str(tmp_path), '--out', 'out'])


def write_run(folder: Path, losses: dict, accuracy: dict, config: str = 'vit.py') -> Path:
    data = folder / '20260101_000000' / 'vis_data'
    data.mkdir(parents=True)
    (folder / config).write_text('')
    lines = [dict(loss=loss, lr=0.1, epoch=1 + i // 10, iter=i, step=i) for i, loss in losses.items()]
    lines += [{'accuracy/top1': value, 'step': epoch} for epoch, value in accuracy.items()]
    (data / 'scalars.json').write_text('\n'.join(map(json.dumps, lines)))
    return folder


def test_runs_of_one_config_make_one_curve(tmp_path, capsys):
    first = write_run(tmp_path / 'seed0', {10: 4.0, 20: 2.0}, {1: 50.0, 2: 70.0})
    second = write_run(tmp_path / 'seed1', {10: 2.0, 20: 1.0, 30: 0.5}, {1: 60.0, 2: 66.0, 3: 80.0})
    other = write_run(tmp_path / 'other', {10: 3.0}, {1: 10.0}, config='vit-dtn.py')
    compare_runs.main([str(first), str(second), str(other), '--out', str(tmp_path / 'out')])
    rows = {(row['config'], row['metric']): row for row in read(tmp_path / 'out' / 'table.csv')}
    # Values at the last step of both runs: (2 + 1) / 2 with deviation 1 / sqrt 2, and (70 + 66) / 2 with 4 / sqrt 2.
    assert rows['vit', 'loss'] == dict(
        config='vit', metric='loss', runs='2', at='iteration 20', last='1.5 +- 0.71', best='1.5 +- 0.71'
    )
    assert rows['vit', 'accuracy/top1']['at'] == 'epoch 2'
    assert rows['vit', 'accuracy/top1']['last'] == '68 +- 2.8'
    assert rows['vit-dtn', 'accuracy/top1']['last'] == '10' and rows['vit-dtn', 'loss']['runs'] == '1'
    assert '| vit-dtn | accuracy/top1 |' in capsys.readouterr().out
    assert len(read(tmp_path / 'out' / 'curves.csv')) == 12
    assert Image.open(tmp_path / 'out' / 'curves.png').width == 1200


def test_the_parts_of_a_resumed_run_are_one_run(tmp_path):
    folder = write_run(tmp_path / 'run', {10: 4.0, 20: 9.0}, {1: 50.0})
    later = folder / '20260102_000000' / 'vis_data'
    later.mkdir(parents=True)
    (later / 'scalars.json').write_text(json.dumps(dict(loss=2.0, epoch=2, iter=20, step=20)))
    run = compare_runs.read_run(folder)
    assert run['loss'] == {10: 4.0, 20: 2.0} and run['accuracy/top1'] == {1: 50.0}


def test_a_log_may_end_in_half_a_line(tmp_path):
    folder = write_run(tmp_path / 'run', {10: 4.0, 20: 9.0}, {})
    (log,) = folder.rglob('scalars.json')
    whole = log.read_text()
    log.write_text(whole[:-4])
    assert compare_runs.read_run(folder)['loss'] == {10: 4.0}
    log.write_text(whole[1:])
    with pytest.raises(UserError, match='line 1 '):
        compare_runs.read_run(folder)


def test_the_best_of_a_loss_is_the_lowest(tmp_path):
    folder = write_run(tmp_path / 'run', {10: 4.0}, {})
    (log,) = folder.rglob('scalars.json')
    lines = [{'loss/cross_entropy': value, 'step': epoch} for epoch, value in ((1, 2.0), (2, 0.5), (3, 0.9))]
    log.write_text('\n'.join(map(json.dumps, lines)))
    compare_runs.main([str(folder), '--metrics', 'loss/cross_entropy', '--out', str(tmp_path / 'out')])
    (row,) = read(tmp_path / 'out' / 'table.csv')
    assert (row['last'], row['best']) == ('0.9', '0.5')


def test_a_metric_that_no_run_has_is_told(tmp_path):
    folder = write_run(tmp_path / 'run', {10: 4.0}, {1: 50.0})
    with pytest.raises(SystemExit, match='accuracy/top5; nearest: accuracy/top1'):
        compare_runs.main([str(folder), '--metrics', 'accuracy/top5', '--out', str(tmp_path / 'out')])
    with pytest.raises(SystemExit, match=r'scalars\.json'):
        compare_runs.main([str(tmp_path), '--out', str(tmp_path / 'out')])


@pytest.mark.slow
def test_browsing_draws_boxes_and_masks_where_the_pipeline_has_moved_them(shapes, tmp_path):
    config = write_detector(tmp_path / 'detector.py', shapes, masks=True)
    cfg = models.read_config(config)
    pictures = browse_dataset.browse(cfg, 'train', tmp_path / 'out', number=2)
    assert len(pictures) == 2
    for path in pictures:
        image = mmcv.imread(path)
        assert max(image.shape[:2]) == 480, '96 px after the pipeline, enlarged'
    plain = cfg.copy()
    for step in plain.train_dataloader.dataset.pipeline:
        if step.type == 'LoadAnnotations':
            step.with_mask = False
    (other, _) = browse_dataset.browse(plain, 'train', tmp_path / 'boxes', number=2)
    assert (mmcv.imread(other) != mmcv.imread(pictures[0])).mean() > 0.02, 'masks are drawn'


def test_browsing_an_image_without_objects_and_a_classification_data_set(shapes, tmp_path):
    cfg = models.read_config(write_detector(tmp_path / 'detector.py', shapes))
    assert len(browse_dataset.browse(cfg, 'val', tmp_path / 'val', number=9)) == 3
    data = write_classification(tmp_path / 'data', train=5, val=5)
    cfg = models.read_config(write_classifier(tmp_path / 'classifier.py', data))
    (path,) = browse_dataset.browse(cfg, 'train', tmp_path / 'classes', number=1)
    source = next((data / 'train' / 'checked').glob('*.jpg'))
    drawn = mmcv.imread(path)
    expected = mmcv.imresize(mmcv.imresize(mmcv.imread(source), (32, 32)), drawn.shape[1::-1])
    corner = (slice(drawn.shape[0] // 2, None), slice(None))  # the label is in the upper half
    apart = min(abs(drawn[corner].astype(int) - flip[corner]).mean() for flip in (expected, expected[:, ::-1]))
    assert apart < 8, 'colours are those of the file'


@pytest.mark.parametrize('number', [8, 26])
def test_labels_of_many_objects_do_not_pile_up(number):
    instances = InstanceData(
        bboxes=torch.tensor([[2.0, 2, 40, 40]]).repeat(number, 1),
        labels=torch.arange(number) % 3,
        scores=torch.ones(number),
    )
    _, axes = figures.panels(1, 1, 3)
    figures.picture(axes[0, 0], np.zeros((64, 64, 3), dtype=np.uint8))
    said = figures.draw_sample(axes[0, 0], dict(pred_instances=instances), ('a', 'b', 'c'), truth=False)
    assert said.startswith(f'{number} objects')
    legend = axes[0, 0].get_legend()
    if number == 8:
        assert len(axes[0, 0].texts) == 8 and legend is None
    else:
        assert len(axes[0, 0].texts) == 0 and [t.get_text() for t in legend.get_texts()] == ['a', 'b', 'c']


def test_an_enlarged_image_has_its_boxes_and_masks_in_place():
    image = np.zeros((4, 6, 3), dtype=np.uint8)
    image[1:3, 2:5] = 255
    mask = image[..., 0] > 0
    instances = InstanceData(bboxes=torch.tensor([[2.0, 1, 5, 3]]), masks=torch.from_numpy(mask)[None])
    sample = dict(pred_instances=instances)
    large = enlarge(image, sample, 3)
    assert large.shape == (12, 18, 3) and instances.bboxes.tolist() == [[6.0, 3, 15, 9]]
    assert (
        np.array_equal(instances.masks[0], large[..., 0] > 0)
        and large[3:9, 6:15].all()
        and large.sum() == 9 * image.sum()
    )
