"""Every command that README and docs show runs, in a directory that has what they expect: `make test-all`.

Those of the tutorial, which need each other, are run by test_tutorial.py.

What this project cannot have for a test is stood in for: COCO, ImageNet and CIFAR by a few generated pictures under
their names, published weights by a file of the same tensors, eight GPUs by two processes, srun by a program that notes
its arguments. Long trainings get `--dry-run`, which builds everything and trains and validates one step, and benchmarks
one repetition. Nothing else is left out.
"""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from mmdet.datasets import CocoDataset
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from PIL import Image

from mmdtn.backbones import ViTDTN
from mmdtn.checkpoints.fetch import local_copy
from mmdtn.datasets import write_coco
from mmdtn.datasets.corruption import BENCHMARK, SEVERITIES
from mmdtn.evaluation import imagenet_folders
from tools.dataset_converters import make_listops

from ..checkpoints import published
from ..checkpoints.files import vit as vit_of_dtns_authors
from ..pages import REPO, commands
from ..training import run_command, write_detector

QUICK = ('python -c', 'python -m mmdtn.doctor', 'python tools/model_converters/convert.py', 'make test')
FINISHED_WITHIN = 20 * 60  # seconds, after which a command counts as hanging


def cases():
    for line, page in commands().items():
        if page == 'docs/tutorial.md':
            continue
        yield pytest.param(
            line, id=f'{page}: {line[:70]}', marks=() if line.startswith(QUICK) else pytest.mark.exhaustive
        )


@pytest.fixture(scope='session')
def place(tmp_path_factory):
    """Creates a directory of links to the repository, with data, weights and finished runs."""
    folder = tmp_path_factory.mktemp('newcomer')
    for name in ('configs', 'tools', 'requirements', 'mmdtn', 'tests', 'Makefile', 'setup.py'):
        (folder / name).symlink_to(REPO / name)
    for name, make in dict(pvt_tiny=published.pvt, levit_128s=published.levit, t2t_vit_t_14=published.t2t).items():
        torch.save(make().file, folder / f'{name}.pth')
    torch.save(vit_of_dtns_authors(384), folder / 'vit_norm_s.pth')
    _pre_trained(folder)
    return folder


@pytest.fixture(scope='session')
def furnished(place):
    _coco(place)
    _folders(place / 'data' / 'imagenet', 1000, 240, ('train', 'val'))
    _folders(place / 'data' / 'cifar10', 10, 32, ('train', 'test'))
    for name in BENCHMARK:
        for severity in SEVERITIES:
            _link(place / 'data' / 'imagenet-c' / name / str(severity), place / 'data' / 'imagenet' / 'val')
    if (REPO / 'docs' / 'evidence').exists():
        shutil.copytree(REPO / 'docs' / 'evidence', place / 'docs' / 'evidence')  # tools/study.py writes there
    for wnid in imagenet_folders()[:2]:
        _link(place / 'data' / 'imagenet-r' / wnid, place / 'data' / 'imagenet' / 'val' / 'n00000000')
    batches = [*(f'data_batch_{i}' for i in range(1, 6)), 'test_batch']
    _cifar(place / 'data/cifar10/cifar-10-batches-py', batches, 'labels', 'batches.meta', 'label_names')
    _cifar(place / 'data/cifar100/cifar-100-python', ['train', 'test'], 'fine_labels', 'meta', 'fine_label_names')
    _published(place)
    for folder in ('listops', 'listops-small'):
        sizes = ['--min-length', '20', '--max-length', '64', '--train', '8', '--val', '4', '--test', '4']
        make_listops.main([str(place / 'data' / folder), *sizes])
    for config, checkpoint in (
        ('pvt/pvt-t-dtn_8xb128_in1k', 'epoch_300'),
        ('swin/swin-t-dtn_8xb128_in1k', 'epoch_300'),
        ('pvt/retinanet_pvt-t-dtn_fpn_1x_coco', 'epoch_12'),
        ('dvt/dvt-mini_4e_cifar10-folder', 'epoch_4'),
        ('vit/vit-mini-bn_b128_cifar10', 'epoch_300'),
        ('listops/transformer-dtn_b32-5k_listops', 'iter_5000'),
        ('dino/dino_vit-s-star-dtn_8xb64-100e_in1k', 'epoch_100'),
        ('dino/dino_vit-mini-dtn_cifar10', 'epoch_1'),
    ):
        _untrained(place, config, checkpoint)
    write_detector(place / 'small.py', place / 'data' / 'few')
    for run, also in (('one', 'vit-mini_4e_cifar10-folder'), ('two', 'vit-mini-dtn_4e_cifar10-folder')):
        run_command(sys.executable, 'tools/train.py', 'small.py', '--work-dir', f'work_dirs/{run}', cwd=place)
        (place / 'work_dirs' / also).symlink_to(run)  # for tools that compare finished runs
    shutil.copy(place / 'work_dirs' / 'one' / 'epoch_2.pth', place / 'small.pth')
    srun = place / 'bin' / 'srun'
    srun.parent.mkdir()
    srun.write_text('#!/bin/sh\nfor a in "$@"; do echo "$a"; done > called.txt\n')
    srun.chmod(0o755)
    return place


def _pre_trained(place):
    """Files of DINO: the published ones, and the teacher of a training here."""
    state = timm.create_model('vit_small_patch16_224', num_classes=0).state_dict()
    torch.save(state, place / 'dino_deitsmall16_pretrain.pth')
    teacher = {f'backbone.{key}': value for key, value in state.items()}
    torch.save(dict(teacher=teacher, epoch=100), place / 'dino_deitsmall16_pretrain_full_checkpoint.pth')
    state = ViTDTN('s*').state_dict()
    torch.save({f'teacher.module.backbone.{key}': value for key, value in state.items()}, place / 'epoch_100.pth')


def _published(place):
    """Writes the weights that detectors start from to the download cache."""
    for config, make in (
        ('pvt/retinanet_pvt-t_fpn_1x_coco', published.pvt),
        ('swin/mask-rcnn_swin-t_fpn_1x_coco', published.swin),
    ):
        url = Config.fromfile(REPO / 'configs' / f'{config}.py').model.backbone.init_cfg.checkpoint
        copy = place / 'home' / local_copy(url).relative_to(Path(torch.hub.get_dir()).parent)
        copy.parent.mkdir(parents=True)
        torch.save(make().file, copy)


def _coco(place):
    """Generates images under COCO's file and class names."""
    shapes = write_coco(place / 'data' / 'few', 8, 4)  # the demo has data/shapes
    coco = place / 'data' / 'coco'
    (coco / 'annotations').mkdir(parents=True)
    for split in ('train', 'val'):
        (coco / f'{split}2017').symlink_to(shapes / split)
        content = json.loads((shapes / 'annotations' / f'instances_{split}.json').read_text())
        content['categories'] = [dict(id=i, name=name) for i, name in enumerate(CocoDataset.METAINFO['classes'], 1)]
        (coco / 'annotations' / f'instances_{split}2017.json').write_text(json.dumps(content))


def _link(place, target):
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(target)


def _folders(root, classes, side, splits):
    """Creates folders for many classes, with images in two of them."""
    for split in splits:
        for number in range(classes):
            folder = root / split / f'n{number:08}'
            folder.mkdir(parents=True)
            for i in range(4 * (number < 2)):
                pixels = np.random.default_rng(10 * number + i).integers(0, 256, (side, side, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f'{i}.png')


def _cifar(root, batches, labels, meta, names):
    """Writes pickles with the keys of CIFAR's files."""
    root.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in batches:
        batch = {'data': rng.integers(0, 256, (8, 3072), dtype=np.uint8), labels: rng.integers(0, 10, 8).tolist()}
        (root / name).write_bytes(pickle.dumps(batch))
    (root / meta).write_bytes(pickle.dumps({names: [f'class {i}' for i in range(100)]}))


def _untrained(place, config, checkpoint):
    """Writes what the training shown before on the page would leave, without training."""
    cfg = Config.fromfile(REPO / 'configs' / f'{config}.py')
    cfg.model.get('backbone', cfg.model).init_cfg = None
    init_default_scope(cfg.default_scope)
    model = MODELS.build(cfg.model)
    model.init_weights()
    target = place / 'work_dirs' / Path(config).name / f'{checkpoint}.pth'
    target.parent.mkdir(parents=True)
    torch.save(dict(state_dict=model.state_dict(), meta={}), target)


def here(line: str) -> str:
    """Adapts the command so that this machine can run it."""
    line = re.sub(r'/path/to/python|\bPYTHON$', sys.executable, line)
    line = re.sub(r'\bCONFIG\b', 'small.py', line)
    line = re.sub(r'\bCHECKPOINT\b', 'small.pth', line)
    line = re.sub(r'\bDIR\b', 'data/few/val', line)
    line = re.sub(r'WORK_DIR\.\.\.', 'work_dirs/one work_dirs/two', line)
    line = line.replace('10.1.1.1', '127.0.0.1')
    line = line.replace('requirements/', f'{REPO}/requirements/')  # not a package of links
    if 'configs/listops/' in line:  # with 32 sequences attention takes more memory than most machines have
        few = ' '.join(f'{split}_dataloader.batch_size=2' for split in ('train', 'val', 'test'))
        before, _, options = line.partition(' --cfg-options ')
        line = f'{before} --cfg-options {few} {options}'.rstrip()
    if line.startswith('make test'):
        line = line.replace('make', 'make -n', 1)  # otherwise this test would run itself
    elif line.startswith('make demo'):
        line = f'make demo PYTHON={sys.executable}'
    elif line.startswith('python tools/train.py configs/'):
        line += ' --dry-run'
        if 'configs/dino/dino_' in line:
            line += ' --cfg-options train_dataloader.batch_size=2'  # it drops the last batch, of few pictures all
    elif 'knn.py' in line:
        config = 'dino_vit-mini-dtn_cifar10'
        line = line.replace('small.py small.pth', f'configs/dino/{config}.py work_dirs/{config}/epoch_1.pth') + ' --k 2'
    elif 'configs/demo/' in line:
        loaders = [f'{split}_dataloader.dataset.data_root=data/few' for split in ('train', 'val', 'test')]
        truth = [f'{split}_evaluator.ann_file=data/few/annotations/instances_val.json' for split in ('val', 'test')]
        line = ' '.join([line, '--dry-run --cfg-options', *loaders, *truth])
    elif 'dist_train.sh' in line:
        line = line.replace('small.py 8', 'small.py 2') + ' --work-dir work_dirs/several'
    elif 'study.py' in line:
        line += ' --report' * ('--report' not in line)  # from the records, because the runs take hours
    elif 'corrupt.py' in line:
        line += ' --yes'
    elif 'benchmark_' in line:
        line += ' --repeats 1'
    if re.search(r'_cifar100?(-224)?\.py', line):
        # MMPretrain checks the checksums of the real files, which generated files cannot have.
        trust = 'import mmpretrain.datasets.cifar as c, runpy, sys; c.check_md5 = lambda *_: True; '
        run = 'sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name="__main__")'
        line = line.replace('python ', f"python -c '{trust}{run}' ", 1)
    return re.sub(r'^((?:[A-Z_]+=\S+ )*)python ', rf'\1{sys.executable} ', line)


@pytest.mark.slow
@pytest.mark.parametrize('line', cases())
def test_command_runs(line, place, request):
    if not line.startswith(QUICK):
        request.getfixturevalue('furnished')
    env = dict(os.environ, PYTHONPATH=str(REPO), CUDA_VISIBLE_DEVICES='', PATH=f'{place}/bin:{os.environ["PATH"]}')
    env |= dict(PYTHON=sys.executable, OMP_NUM_THREADS='1', TORCH_HOME=str(place / 'home'))
    command = here(line)
    nodes = [command, command.replace('NODE_RANK=0', 'NODE_RANK=1')] if 'NODE_RANK=' in command else [command]
    pipes = dict(text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    running = [subprocess.Popen(node, shell=True, cwd=place, env=env, **pipes) for node in nodes]
    for process in running:
        said, _ = process.communicate(timeout=FINISHED_WITHIN)
        assert process.returncode == 0, f'{command}\n{said[-4000:]}'
    check = CHECKS.get(next((name for name in CHECKS if name in line), ''))
    if check is not None:
        check(place, said)


def _demo_learned(place, said):
    metrics = json.loads((place / 'work_dirs' / 'demo' / 'summary.json').read_text())
    assert metrics['coco/bbox_mAP_50'] >= 0.70 and metrics['coco/segm_mAP_50'] >= 0.65, said[-1500:]


def _called_srun(place, said):
    called = (place / 'called.txt').read_text().splitlines()
    assert '--ntasks=16' in called and 'small.py' in called


# Files or output that a command has to produce, besides ending well.
CHECKS = {
    'make demo': _demo_learned,
    'slurm_train.sh': _called_srun,
    '--out pvt-t.pth': lambda place, said: torch.load(place / 'pvt-t.pth', weights_only=True),
    '--out pvt-t-dtn.pth': lambda place, said: torch.load(place / 'pvt-t-dtn.pth', weights_only=True),
    '--out report': lambda place, said: (place / 'report' / 'report.html').read_text(),
    '--out curves': lambda place, said: (place / 'curves' / 'curves.png').read_bytes(),
}
