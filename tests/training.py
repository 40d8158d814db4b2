"""Small data, small configs and the command line, for the tests of training and evaluation."""

import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

REPO = Path(__file__).parents[1]
ARCH = dict(base='tiny', depths=(1, 1, 1, 1), widths=(16, 32, 40, 64), mlp_ratios=(2, 2, 2, 2), _delete_=True)

CLASSIFIER = """
_base_ = '{repo}/configs/pvt/pvt-t-dtn_8xb128_in1k.py'
model = dict(backbone=dict(arch={arch}), head=dict(in_channels=64, num_classes=5),
             train_cfg=dict(_delete_=True))
data_preprocessor = dict(num_classes=5)
_load = [dict(type='LoadImageFromFile'), dict(type='Resize', scale=(32, 32))]
_train = dict(type='CustomDataset', data_root='{data}', data_prefix='train', with_label=True,
              pipeline=[*_load, dict(type='RandomFlip', prob=0.5), dict(type='PackInputs')])
_val = dict(_train, data_prefix='val', pipeline=[*_load, dict(type='PackInputs')])
_loader = dict(_delete_=True, batch_size=4, num_workers=0, persistent_workers=False)
train_dataloader = dict(_loader, dataset=_train, sampler=dict(type='DefaultSampler', shuffle=True))
val_dataloader = dict(_loader, dataset=_val, sampler=dict(type='DefaultSampler', shuffle=False))
test_dataloader = val_dataloader
val_evaluator = test_evaluator = dict(type='Accuracy', topk=(1,))
optim_wrapper = dict(optimizer=dict(lr=1e-3))
param_scheduler = [dict(type='LinearLR', start_factor=0.1, by_epoch=False, end=5),
                   dict(type='CosineAnnealingLR', by_epoch=True, begin=1, end=4)]
train_cfg = dict(max_epochs=2, val_interval=1)
default_hooks = dict(logger=dict(interval=1))
randomness = dict(seed=3)
"""

DETECTOR = """
_base_ = '{repo}/configs/pvt/{base}.py'
_classes = dict(classes=('checked', 'cross', 'ring', 'striped', 'triangle'))
model = dict(
    data_preprocessor=dict(pad_size_divisor=32),
    backbone=dict(arch={arch}, init_cfg=None),
    neck=dict(in_channels=[16, 32, 40, 64], out_channels=32),
    {head}
)
_load = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations', with_bbox=True, with_mask={masks})]
_resize = dict(type='Resize', scale=(96, 96), keep_ratio=True)
_train = dict(type='CocoDataset', data_root='{data}', ann_file='annotations/instances_train.json', metainfo=_classes,
              data_prefix=dict(img='train/'), filter_cfg=dict(filter_empty_gt=True, min_size=8),
              pipeline=[*_load, _resize, dict(type='RandomFlip', prob=0.5), dict(type='PackDetInputs')])
_meta = ('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor')
_val = dict(type='CocoDataset', data_root='{data}', ann_file='annotations/instances_val.json', metainfo=_classes,
            data_prefix=dict(img='val/'), test_mode=True,
            pipeline=[_load[0], _resize, _load[1], dict(type='PackDetInputs', meta_keys=_meta)])
_loader = dict(_delete_=True, batch_size=2, num_workers=0, persistent_workers=False)
train_dataloader = dict(_loader, dataset=_train, sampler=dict(type='DefaultSampler', shuffle=True),
                        batch_sampler=dict(type='AspectRatioBatchSampler'))
val_dataloader = dict(_loader, dataset=_val, sampler=dict(type='DefaultSampler', shuffle=False))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file='{data}/annotations/instances_val.json')
test_evaluator = val_evaluator
param_scheduler = [dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=10)]
train_cfg = dict(max_epochs=2, val_interval=1)
default_hooks = dict(logger=dict(interval=1))
randomness = dict(seed=3)
"""

RETINANET_HEAD = 'bbox_head=dict(num_classes=5, in_channels=32, feat_channels=32, stacked_convs=1),'
MASK_RCNN_HEAD = """
    rpn_head=dict(in_channels=32, feat_channels=32),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=32),
        bbox_head=dict(num_classes=5, in_channels=32, fc_out_channels=64),
        mask_roi_extractor=dict(out_channels=32),
        mask_head=dict(num_classes=5, num_convs=1, in_channels=32, conv_out_channels=32)),
"""


def write_classifier(path: Path, data: Path, more: str = '') -> Path:
    path.write_text(CLASSIFIER.format(repo=REPO, arch=ARCH, data=data) + more)
    return path


def write_detector(path: Path, data: Path, more: str = '', masks: bool = False) -> Path:
    text = DETECTOR.format(
        repo=REPO,
        arch=ARCH,
        data=data,
        masks=masks,
        base='mask-rcnn_pvt-t-dtn_fpn_1x_coco' if masks else 'retinanet_pvt-t-dtn_fpn_1x_coco',
        head=MASK_RCNN_HEAD if masks else RETINANET_HEAD,
    )
    path.write_text(text + more)
    return path


def run_tool(name: str, *arguments, cwd: Path, check: bool = True, **env: str) -> subprocess.CompletedProcess:
    """A Python or shell script of tools/."""
    start = [REPO / 'tools' / name] if name.endswith('.sh') else [sys.executable, REPO / 'tools' / name]
    return run_command(*start, *arguments, cwd=cwd, check=check, **env)


def run_command(*command, cwd: Path, check: bool = True, **env: str) -> subprocess.CompletedProcess:
    ours = dict(PYTHON=sys.executable, PYTHONPATH=str(REPO), CUDA_VISIBLE_DEVICES='', OMP_NUM_THREADS='1')
    env = os.environ | ours | env
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=cwd, env=env)
    if check:
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def in_two_processes(tool: Callable[[list[str]], None], *arguments, cwd: Path) -> list[str | int]:
    """``main`` of a tool as `tools/dist_*.sh` starts it: how each process exits, a message or 0.

    The two are forks of this process, which has imported everything already.
    """
    addresses = dict(MASTER_ADDR='127.0.0.1', MASTER_PORT=free_port(), WORLD_SIZE='2', CUDA_VISIBLE_DEVICES='')
    children = []
    for rank in range(2):
        exited = cwd / f'exit_{rank}.json'
        exited.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            signal.alarm(300)  # for one that waits in vain for the other
            os.chdir(cwd)
            os.environ.update(addresses, RANK=str(rank), LOCAL_RANK=str(rank))
            code: str | int | None = 0
            with open(cwd / f'said_{rank}.txt', 'w') as said, redirect_stdout(said), redirect_stderr(said):
                try:
                    tool([*map(str, arguments), '--launcher', 'pytorch'])
                except SystemExit as stop:
                    code = stop.code
                except BaseException:
                    code = traceback.format_exc()
            exited.write_text(json.dumps(code or 0))
            os._exit(0)
        children.append((child, exited))
    for child, _ in children:
        os.waitpid(child, 0)
    return [json.loads(exited.read_text()) if exited.exists() else 'killed' for _, exited in children]


def free_port() -> str:
    """Asked of the system, as tests run side by side."""
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return str(s.getsockname()[1])


def metrics(work_dir: Path) -> dict:
    """What the test of a checkpoint wrote down."""
    (path,) = (p for p in work_dir.glob('*/*.json') if p.stem == p.parent.name)
    return json.loads(path.read_text())


def log_of(work_dir: Path) -> str:
    return ''.join(path.read_text() for path in sorted(work_dir.glob('*/*.log')))
