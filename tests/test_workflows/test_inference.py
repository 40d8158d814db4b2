"""Runs the Python code in docs/inference.md unchanged, in a folder with the files that it names."""

import json
import re
import shutil

import pytest
import torch
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.registry import MODELS, DefaultScope, init_default_scope

from mmdtn.datasets import write_classification, write_coco

from ..pages import REPO
from ..training import write_classifier, write_detector

PIECES = {}  # by a name that the block imports or calls
for block in re.findall(r'(?:^ {4}.*\n|^\n(?= {4}))+', (REPO / 'docs' / 'inference.md').read_text(), re.M):
    for word in ('import inference_detector', 'DetInferencer', 'ImageClassificationInferencer', 'compile('):
        if word in block:
            PIECES[word] = re.sub(r'^ {4}', '', block, flags=re.M)
EVERY_BOX = '\nmodel.update(test_cfg=dict(score_thr=0.0, max_per_img=20))\n'  # weights are random
CASCADE = """
_base_ = '{repo}/configs/dvt/dvt-mini_4e_cifar10-folder.py'
model = dict(arch=dict(width=48, depth=2), num_classes=5, thresholds=[0.2])
_load = [dict(type='LoadImageFromFile'), dict(type='Resize', scale=(32, 32)), dict(type='PackInputs')]
test_dataloader = dict(dataset=dict(data_root='{data}', data_prefix='val', pipeline=_load))
"""


def save_random(config, classes):
    """Saves a checkpoint as after training, but with random weights."""
    cfg = Config.fromfile(config)
    init_default_scope(cfg.default_scope)
    settings = dict(cfg.model, data_preprocessor=cfg.model.get('data_preprocessor', cfg.get('data_preprocessor')))
    torch.manual_seed(0)
    model = MODELS.build(settings).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn_like(p))
    checkpoint = dict(state_dict=model.state_dict(), meta=dict(dataset_meta=dict(classes=classes)))
    torch.save(checkpoint, config.with_suffix('.pth'))
    return model, cfg


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('inference')
    shapes = write_coco(folder / 'shapes', 1, 3)
    shutil.copytree(shapes / 'val', folder / 'pictures')
    shutil.copy(folder / 'pictures' / '000001.jpg', folder / 'street.jpg')
    classes = ('checked', 'cross', 'ring', 'striped', 'triangle')
    save_random(write_detector(folder / 'detector.py', shapes, EVERY_BOX), classes)
    yield folder
    DefaultScope._instance_dict.clear()


@pytest.fixture
def run(folder, monkeypatch):
    """Runs one block of the page. ``names`` has the variables of earlier blocks."""
    monkeypatch.chdir(folder)

    def execute(piece, names, change=lambda text: text):
        exec(change(PIECES[piece]), names)
        return names

    return execute


@pytest.mark.slow
def test_detectors(run, folder, capsys):
    one = run('import inference_detector', {})['found']
    results = run('DetInferencer', {})['results']
    said = capsys.readouterr().out
    assert len(one) == 20 and len(results['predictions']) == 3 and '3 pictures' in said
    of_batch = results['predictions'][0]  # where sums are rounded differently
    torch.testing.assert_close(one.scores, torch.tensor(of_batch['scores']), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(one.bboxes, torch.tensor(of_batch['bboxes']), rtol=0, atol=1e-2)
    for picture in (folder / 'pictures').iterdir():
        assert (folder / 'found' / 'vis' / picture.name).exists()
        saved = json.loads((folder / 'found' / 'preds' / f'{picture.stem}.json').read_text())
        assert len(saved['bboxes']) == 20


@pytest.mark.slow
@pytest.mark.parametrize('backend', ['eager', pytest.param('inductor', marks=pytest.mark.exhaustive)])
def test_a_compiled_detector_finds_the_same(run, backend):
    torch._dynamo.reset()
    names = run('import inference_detector', {})
    run('compile(', names, lambda text: text.replace('dynamic=True', f'dynamic=True, backend={backend!r}'))
    counters = torch._dynamo.utils.counters
    assert counters['frames']['ok'] > 0 and counters['stats']['calls_captured'] > 100
    one, other = names['found'], names['compiled']
    torch.testing.assert_close(other.scores, one.scores, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(other.bboxes, one.bboxes, rtol=1e-4, atol=1e-2)
    assert torch.equal(other.labels, one.labels)


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['classifier', 'cascade'])
def test_classifiers(run, folder, kind):
    data, classes = write_classification(folder / kind, train=5, val=5), [f'kind {i}' for i in range(5)]
    config = folder / 'classifier.py'
    if kind == 'cascade':
        config.write_text(CASCADE.format(repo=REPO, data=data))
    else:
        write_classifier(config, data)
    model, cfg = save_random(config, classes)
    names = run('ImageClassificationInferencer', {})
    pipeline = Compose(cfg.test_dataloader.dataset.pipeline)
    paths = ['street.jpg', 'pictures/000002.jpg']
    batch = [pipeline(dict(img_path=path)) for path in paths]
    with torch.no_grad():
        inputs = dict(inputs=[b['inputs'] for b in batch], data_samples=[b['data_samples'] for b in batch])
        want = model.test_step(inputs)
    for got, sample in zip(names['classify'](paths), want, strict=True):
        assert got['pred_class'] == classes[int(sample.pred_label)]
        assert got['pred_score'] == pytest.approx(sample.pred_score.max().item(), rel=1e-4)
    assert names['result']['pred_class'] == got['pred_class']
