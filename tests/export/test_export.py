"""Exported models, run by predict.py, give the same results as the original models."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import onnxruntime
import pytest
import torch
from mmdet.apis import inference_detector, init_detector
from mmdet.models import RetinaHead
from mmengine.registry import MODELS
from mmpretrain import ImageClassificationInferencer, get_model
from PIL import Image

from mmdtn.export import predict as predict_file
from mmdtn.export.graphs import graph_of
from mmdtn.export.predict import Model, mask_of
from mmdtn.export.verify import compare
from mmdtn.models import load
from tests.export import small
from tests.export.agreement import match
from tests.training import REPO, run_command
from tools.deployment.export import main as export

OTHER_PACKAGES = ('torch', 'torchvision', 'mmengine', 'mmcv', 'mmdet', 'mmpretrain', 'mmdtn', 'cv2', 'timm', 'onnx')
ALONE = """
import runpy, sys
sys.modules |= dict.fromkeys({})
sys.argv = {}
runpy.run_path(sys.argv[0], run_name='__main__')
"""
SIZES = ((130, 190), (192, 192), (300, 200), (97, 400), (64, 48))


@MODELS.register_module()
class LyingHead(RetinaHead):
    """Head whose boxes are shifted by five pixels from its outputs."""

    def predict(self, *args, **kwargs):
        found = super().predict(*args, **kwargs)
        for one in found:
            one.bboxes += 5
        return found


@pytest.fixture(scope='module')
def detector(tmp_path_factory):
    """Returns folder, config and checkpoint. The folder has model.onnx, predict.py and images of five sizes."""
    folder = tmp_path_factory.mktemp('detector')
    config, checkpoint = small.write(folder, small.RETINANET)
    export([config, checkpoint, '--out', str(folder / 'model.onnx')])
    for i, size in enumerate(SIZES):
        small.write_picture(folder / f'{i}.png', *size)
    small.write_picture(folder / 'even.png', 150, 170, even=True)
    return folder, config, checkpoint


def predict(folder, *arguments):
    """Runs predict.py in a process that cannot import the packages of the training environment."""
    command = ALONE.format(OTHER_PACKAGES, [str(folder / 'predict.py'), *map(str, arguments)])
    return subprocess.run([sys.executable, '-I', '-c', command], capture_output=True, text=True)


@pytest.mark.slow
def test_predict_finds_what_mmdetection_finds(detector):
    folder, config, checkpoint = detector
    pictures = [folder / f'{i}.png' for i in range(len(SIZES))]
    done = predict(folder, folder / 'model.onnx', *pictures, folder / 'even.png', '--out', folder / 'found')
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / 'found' / 'predictions.json').read_text())
    assert found.pop(str(folder / 'even.png')) == dict(boxes=[], labels=[], names=[], scores=[])
    model = init_detector(config, checkpoint, device='cpu')
    boxes = 0
    for path in pictures:
        ours = found[str(path)]
        theirs = inference_detector(model, str(path)).pred_instances
        matched, unmatched, pixels, scores = match(theirs, ours)
        assert unmatched == 0 and pixels < 0.1 and scores < 1e-4
        with Image.open(path) as before, Image.open(folder / 'found' / path.name) as after:
            assert after.size == before.size
        boxes += matched
    assert boxes > 50


@pytest.mark.slow
def test_the_file_says_what_it_is(detector):
    folder, _, _ = detector
    model = onnx.load(folder / 'model.onnx')
    onnx.checker.check_model(model, full_check=True)
    about = json.loads({p.key: p.value for p in model.metadata_props}['mmdtn'])
    assert about['classes'] == ['checked', 'cross', 'ring', 'striped', 'triangle']
    assert about['prepare'] == [
        dict(do='resize', scale=[192, 192], keep_ratio=True, backend='cv2', interpolation='bilinear')
    ]
    assert about['multiple'] == 32 and about['size'] is None
    np.testing.assert_allclose(about['pad'], [123.675, 116.28, 103.53], rtol=1e-6)
    assert about['versions']['torch'] == torch.__version__ and len(about['checkpoint']) == 64
    assert [o.name for o in model.graph.output] == ['boxes', 'scores', 'labels']


@pytest.mark.slow
def test_a_file_that_differs_from_the_model_is_not_written(tmp_path):
    config, checkpoint = small.write(
        tmp_path, small.RETINANET.replace('num_classes=5,', "type='LyingHead', num_classes=5,")
    )
    with pytest.raises(SystemExit, match=r'[0-9.]+ pixels .*256 x 256.*0\.01'):
        export([config, checkpoint, '--out', str(tmp_path / 'model.onnx'), '--size', '256', '256'])
    assert sorted(p.name for p in tmp_path.iterdir()) == ['config.py', 'weights.pth']


@pytest.mark.slow
@pytest.mark.parametrize('lies', [False, True])
def test_what_a_threshold_hides_is_compared_too(tmp_path, capsys, lies):
    text = small.RETINANET.replace('test_cfg=dict(', 'test_cfg=dict(score_thr=0.9999, ')
    text = text.replace('num_classes=5,', "type='LyingHead', num_classes=5,") if lies else text
    arguments = [*small.write(tmp_path, text), '--out', str(tmp_path / 'to' / 'model.onnx'), '--size', '256', '256']
    if lies:
        with pytest.raises(SystemExit, match=r'boxes .* [0-9.]+ pixels .*0\.01'):
            export(arguments)
    else:
        export(arguments)
        assert ' boxes over 0.' in capsys.readouterr().out
        model = onnx.load(tmp_path / 'to' / 'model.onnx')
        assert any(abs(v - 0.9999) < 1e-6 for v in constants(model)), 'the file has its own threshold'


def constants(model):
    tensors = [
        *model.graph.initializer,
        *(a.t for n in model.graph.node for a in n.attribute if n.op_type == 'Constant'),
    ]
    for tensor in tensors:
        values = onnx.numpy_helper.to_array(tensor).flatten()
        if values.size == 1:
            yield float(values[0])


@pytest.mark.slow
def test_pictures_of_every_kind(detector, tmp_path):
    """Images of sixteen bits, grey images and EXIF orientations are supported. Broken images are listed at the end."""
    folder, config, checkpoint = detector
    source = tmp_path / 'pictures'
    source.mkdir()
    with Image.open(folder / '0.png') as picture:
        grey = picture.convert('L')
        grey.save(source / 'grey.png')
        Image.fromarray(np.asarray(grey).astype(np.uint16) * 256).save(source / 'sixteen.png')
        exif = Image.Exif()
        exif[0x0112] = 6
        picture.save(source / 'turned.jpg', exif=exif, quality=100, subsampling=0)
    (source / 'broken.jpg').write_bytes((source / 'turned.jpg').read_bytes()[:300])
    (source / 'folder.jpg').mkdir()
    done = predict(folder, folder / 'model.onnx', source, '--out', tmp_path / 'found')
    assert done.returncode == 1 and done.stderr.startswith('error: 1 of 4 '), done.stderr
    assert f'{source}/broken.jpg: ' in done.stderr and 'Traceback' not in done.stderr
    found = json.loads((tmp_path / 'found' / 'predictions.json').read_text())
    model = init_detector(config, checkpoint, device='cpu')
    assert len(found) == 3
    for path, ours in found.items():
        matched, unmatched, pixels, scores = match(inference_detector(model, path).pred_instances, ours)
        assert matched > 3 and unmatched == 0 and pixels < 0.1 and scores < 1e-4
    done = predict(folder, folder / 'model.onnx', source / 'grey.png', '--out', source)
    assert 'grey.png' in done.stderr and '--out' in done.stderr
    (tmp_path / 'none').mkdir()
    done = predict(folder, folder / 'model.onnx', tmp_path / 'none', '--out', tmp_path / 'found')
    assert done.stderr.startswith('error: no image in ')
    (tmp_path / 'cut.onnx').write_bytes((folder / 'model.onnx').read_bytes()[:1000])
    done = predict(folder, tmp_path / 'cut.onnx', source, '--out', tmp_path / 'found')
    assert 'cut.onnx cannot be loaded: ' in done.stderr and 'Traceback' not in done.stderr


def test_files_of_others_are_not_overwritten(tmp_path):
    config, checkpoint = small.write(tmp_path, small.RETINANET)
    (tmp_path / 'predict.py').write_text('print("mine")')
    with pytest.raises(SystemExit, match=r'predict\.py'):
        export([config, checkpoint, '--out', str(tmp_path / 'model.onnx')])
    assert (tmp_path / 'predict.py').read_text() == 'print("mine")'
    first_line = Path(predict_file.__file__).read_text().partition('\n')[0]
    (tmp_path / 'predict.py').write_text(f'{first_line}\n# of an older version')
    with pytest.raises(SystemExit, match='multiples of 32'):  # the next check
        export([config, checkpoint, '--out', str(tmp_path / 'model.onnx'), '--size', '250', '300'])


def test_a_damaged_checkpoint_and_a_pipeline_that_reads_otherwise(tmp_path):
    config, checkpoint = small.write(
        tmp_path,
        small.RETINANET.replace("type='LoadImageFromFile'", "type='LoadImageFromFile', color_type='grayscale'"),
    )
    with pytest.raises(SystemExit, match=r"color_type='grayscale'"):
        export([config, checkpoint, '--out', str(tmp_path / 'model.onnx')])
    with open(checkpoint, 'r+b') as file:
        file.truncate(2000)
    with pytest.raises(SystemExit, match=r'^error: .*weights\.pth .*2000'):
        export([config, checkpoint, '--out', str(tmp_path / 'model.onnx')])


def test_images_of_other_channels_are_refused(tmp_path):
    config, checkpoint = small.write(tmp_path, small.LEVIT.replace('img_size=64,', 'img_size=64, in_channels=1,'))
    with pytest.raises(SystemExit, match=r'1 channels.*RGB'):
        export([config, checkpoint, '--out', str(tmp_path / 'model.onnx')])


@pytest.mark.slow
def test_the_graph_of_mask_rcnn(tmp_path):
    """Before the export, the outputs equal those of MMDetection."""
    model = load(*small.write(tmp_path, small.MASK_RCNN)).model
    graph = graph_of(model, reads_bgr=True, raw=False).eval()
    for size in ((256, 320), (128, 96)):
        compared = compare(graph, graph, 1, *size)
        assert compared.boxes > 20 and compared.difference < 1e-6 and compared.pixels < 1e-6


@pytest.mark.exhaustive
def test_mask_rcnn(tmp_path):
    config, checkpoint = small.write(tmp_path, small.MASK_RCNN)
    export([config, checkpoint, '--out', str(tmp_path / 'model.onnx')])
    pictures = [small.write_picture(tmp_path / f'{i}.png', *size) for i, size in enumerate(SIZES)]
    done = predict(tmp_path, tmp_path / 'model.onnx', *pictures, '--out', tmp_path / 'found')
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / 'found' / 'predictions.json').read_text())
    model = init_detector(config, checkpoint, device='cpu')
    shown = 0
    for path in pictures:
        theirs, ours = inference_detector(model, str(path)).pred_instances, found[str(path)]
        matched, unmatched, pixels, scores = match(theirs, ours)
        assert matched > 20 and unmatched == 0 and pixels < 0.1 and scores < 1e-4
        for mask, box in zip(theirs.masks.numpy(), theirs.bboxes.numpy(), strict=True):
            nearest = abs(np.array(ours['boxes']) - box).max(1).argmin()
            assert (mask_of(ours['masks'][nearest]) != mask).mean() < 1e-3
            shown += mask.any()
    assert shown > 50


def test_a_second_stage_of_another_kind(tmp_path):
    config = small.write(tmp_path, small.MASK_RCNN, "model['test_cfg']['rcnn'].update(mask_thr_binary=0.4)\n")
    with pytest.raises(SystemExit, match=r'^error: StandardRoIHead .*mask_thr_binary=0\.5'):
        export([*config, '--out', str(tmp_path / 'model.onnx')])


@pytest.mark.slow
def test_classifier(tmp_path):
    config, checkpoint = small.write(tmp_path, small.CLASSIFIER)
    export([config, checkpoint, '--out', str(tmp_path / 'model.onnx')])
    session = onnxruntime.InferenceSession(tmp_path / 'model.onnx')
    assert session.run(None, dict(image=np.zeros((3, 3, 96, 64), dtype=np.float32)))[0].shape == (3, 5)
    picture = small.write_picture(tmp_path / 'picture.png', 90, 130)
    done = predict(tmp_path, tmp_path / 'model.onnx', picture, '--out', tmp_path / 'found')
    assert done.returncode == 0, done.stderr
    (found,) = json.loads((tmp_path / 'found' / 'predictions.json').read_text()).values()
    classes = ('checked', 'cross', 'ring', 'striped', 'triangle')
    theirs = ImageClassificationInferencer(config, checkpoint, device='cpu', classes=classes)(str(picture))[0]
    np.testing.assert_allclose(found['scores'], np.sort(theirs['pred_scores'])[::-1], atol=1e-5)
    assert found['labels'] == np.argsort(-theirs['pred_scores']).tolist() and found['names'][0] == theirs['pred_class']
    assert np.ptp(found['scores']) > 0.01


@pytest.mark.slow
def test_eps_goes_into_the_file(tmp_path):
    """The outputs of a model whose eps is far from the default are those of the file."""
    eps = "norm_cfg=dict(type='DTN', eps=0.3), other_norm_cfg=dict(type='LN', eps=0.2)"
    config, checkpoint = small.write(tmp_path, small.CLASSIFIER.replace("type='ViTDTN',", f"type='ViTDTN', {eps},"))
    export([config, checkpoint, '--out', str(tmp_path / 'model.onnx')])
    image = np.random.default_rng(0).uniform(0, 255, (1, 3, 64, 64)).astype(np.float32)
    session = onnxruntime.InferenceSession(tmp_path / 'model.onnx')
    (found,) = session.run(None, {session.get_inputs()[0].name: image})
    model = load(config, checkpoint).model
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ([123.7, 116.3, 103.5], [58.4, 57.1, 57.4]))
    with torch.no_grad():
        want = model((torch.from_numpy(image) - mean) / std).softmax(1)
    np.testing.assert_allclose(found, want.numpy(), rtol=1e-3, atol=1e-4)


def test_one_size(tmp_path):
    config, checkpoint = small.write(tmp_path, small.LEVIT)
    with pytest.raises(SystemExit, match=r'--size H W.*64 x 64'):
        export([config, checkpoint, '--out', str(tmp_path / 'model.onnx')])


@pytest.mark.exhaustive
def test_torchs_format(tmp_path):
    config, checkpoint = small.write(tmp_path, small.LEVIT)
    file = tmp_path / 'model.pt2'
    export([config, checkpoint, '--out', str(file), '--format', 'pt2', '--raw', '--size', '64', '64'])
    image = torch.rand(2, 3, 64, 64) * 255
    logits = torch.export.load(file).module()(image)
    model = get_model(config, checkpoint, device='cpu')
    with torch.no_grad():  # the original model reads BGR
        expected = model(model.data_preprocessor(dict(inputs=image.flip(1)))['inputs'], mode='tensor')
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture
def fcos(tmp_path):
    head = "type='FCOSHead', num_classes=5, in_channels=8, feat_channels=8, stacked_convs=1, strides=[8, 16], "
    more = f"model['bbox_head'] = dict(_delete_=True, {head} norm_cfg=None)\n"
    return small.write(tmp_path, small.RETINANET, more)


def test_another_head(tmp_path, fcos):
    with pytest.raises(SystemExit, match=r'^error: FCOSHead .*DeltaXYWHBBoxCoder.*--raw'):
        export([*fcos, '--out', str(tmp_path / 'model.onnx')])


@pytest.mark.exhaustive
def test_raw_outputs_of_another_head(tmp_path, fcos):
    export([*fcos, '--out', str(tmp_path / 'model.onnx'), '--size', '64', '96', '--raw'])
    session = onnxruntime.InferenceSession(tmp_path / 'model.onnx')
    names = [f'output_{kind}_{level}' for kind in range(3) for level in range(2)]
    assert [o.name for o in session.get_outputs()] == names
    image = np.random.default_rng(0).uniform(0, 255, (1, 3, 64, 96)).astype(np.float32)
    model = init_detector(*fcos, device='cpu')
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ([123.675, 116.28, 103.53], [58.395, 57.12, 57.375]))
    with torch.no_grad():
        theirs = model((torch.from_numpy(image) - mean) / std, mode='tensor')
    for got, want in zip(session.run(None, dict(image=image)), [t for kind in theirs for t in kind], strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)
    with pytest.raises(ValueError, match='exported with --raw'):
        Model(tmp_path / 'model.onnx')


def test_sides_that_32_does_not_divide(tmp_path):
    config, checkpoint = small.write(tmp_path, small.RETINANET)
    with pytest.raises(SystemExit, match=r'^error: --size 250 300.* 32'):
        export([config, checkpoint, '--out', str(tmp_path / 'model.onnx'), '--size', '250', '300'])


@pytest.mark.parametrize('missing', ['onnx', 'onnxscript', 'onnxruntime'])
def test_without_a_package(tmp_path, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit, match=rf'^error: {missing} .*pip install mmdtn\[export\]$'):
        export(['config.py', 'weights.pth', '--out', str(tmp_path / 'model.onnx')])


@pytest.mark.slow
@pytest.mark.parametrize('form', ['pt2', 'onnx'])
def test_only_onnx_files_need_its_packages(tmp_path, form):
    """Runs the export in a new process, which has not imported the packages yet."""
    config, checkpoint = small.write(tmp_path, small.LEVIT)
    wanted = [config, checkpoint, '--out', str(tmp_path / f'model.{form}'), '--format', form, '--size', '64', '64']
    script = REPO / 'tools' / 'deployment' / 'export.py'
    command = ALONE.format(('onnxruntime', 'onnxscript'), [str(script), *wanted])
    done = run_command(sys.executable, '-c', command, cwd=tmp_path, check=False)
    assert (tmp_path / f'model.{form}').exists() == (form == 'pt2') == (done.returncode == 0), done.stderr
    assert form == 'pt2' or done.stderr.endswith('pip install mmdtn[export]\n')


def test_predict_without_onnxruntime(tmp_path):
    command = ALONE.format(('onnxruntime',), [predict_file.__file__, 'model.onnx', 'picture.png', '--out', 'found'])
    done = subprocess.run([sys.executable, '-I', '-c', command], capture_output=True, text=True)
    assert done.stderr == 'error: predict.py needs onnxruntime: pip install numpy pillow onnxruntime\n'
