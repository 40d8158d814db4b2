"""Follows docs/tutorial.md: writes its files, and runs its commands and code in order."""

import json
import re
import shlex
import sys

import pytest
import torch

from ..pages import REPO
from ..training import run_command

# As little data as possible, and one epoch instead of two.
SHORTER = [
    (r'--train 60 --val 12', '--train 6 --val 2'),
    (r'--train 60 --val 20', '--train 20 --val 5'),
    (r'max_epochs=2, val_interval=[12]', 'max_epochs=1, val_interval=1'),
    (r'epoch_2\.pth', 'epoch_1.pth'),
]


def blocks():
    """Yields the code blocks without their indentation."""
    text = (REPO / 'docs' / 'tutorial.md').read_text()
    for found, replacement in SHORTER:
        assert re.search(found, text), found
        text = re.sub(found, replacement, text)
    for block in re.findall(r'(?:^ {4}.*\n|^\n(?= {4}))+', text, re.M):
        yield re.sub(r'^ {4}', '', block, flags=re.M).strip() + '\n'


@pytest.fixture(scope='module')
def done(tmp_path_factory):
    """Returns the directory in which everything was run, and the remaining blocks of Python code."""
    folder = tmp_path_factory.mktemp('tutorial')
    for name in ('tools', 'configs'):
        (folder / name).symlink_to(REPO / name)
    python = {}
    for block in blocks():
        if name := re.match(r'# (\S+\.py)\n', block):
            (folder / name[1]).write_text(block)
        elif block.startswith('python '):
            for line in block.splitlines():
                run_command(sys.executable, *shlex.split(line)[1:], cwd=folder)
        elif imported := re.match(r'from mmdet.apis import (.+)\n', block):
            python[imported[1]] = block
    return folder, python


@pytest.fixture
def run(done, monkeypatch):
    """Runs a block of Python code, and returns the variables that it defines."""
    folder, python = done
    monkeypatch.chdir(folder)

    def execute(imported):
        names = {}
        exec(python[imported], names)
        return names

    return execute


@pytest.mark.slow
def test_it_trains_tests_and_reports(done):
    folder, _ = done
    work = folder / 'work_dirs' / 'retinanet_dtn_tutorial'
    weights = torch.load(work / 'epoch_1.pth', weights_only=False)['state_dict']
    assert any(name.startswith('backbone.') and name.endswith('mean_mix') for name in weights)
    tested = [p for p in work.glob('*/*.json') if 'coco/bbox_mAP' in p.read_text()]
    assert tested and '<img' in (folder / 'report' / 'report.html').read_text()


@pytest.mark.slow
def test_the_classifier(done):
    work = done[0] / 'work_dirs' / 'classifier_tutorial'
    assert (work / 'epoch_1.pth').exists()
    assert len([p for p in work.glob('*/*.json') if 'accuracy/top1' in p.read_text()]) == 1


@pytest.mark.slow
def test_init_detector(run, capsys):
    found = run('inference_detector, init_detector')['found']
    assert found.bboxes.shape == (len(found.scores), 4) and len(found) > 0 and found.scores.isfinite().all()
    assert re.search(
        r'\d+ boxes; the best: 0\.\d+ \[.+\]\n(checked|cross|ring|striped|triangle)\n', capsys.readouterr().out
    )


@pytest.mark.slow
def test_det_inferencer(run, done):
    results = run('DetInferencer')['results']
    folder, _ = done
    assert len(results['predictions']) == 2
    for name in ('000001', '000002'):
        assert (folder / 'found' / 'vis' / f'{name}.jpg').exists()
        saved = json.loads((folder / 'found' / 'preds' / f'{name}.json').read_text())
        assert len(saved['bboxes']) == len(saved['scores']) > 0


@pytest.mark.slow
def test_both_see_the_same(run):
    one = run('inference_detector, init_detector')['found']
    other = run('DetInferencer')['results']['predictions'][0]
    torch.testing.assert_close(one.scores, torch.tensor(other['scores']))
    torch.testing.assert_close(one.bboxes, torch.tensor(other['bboxes']))
