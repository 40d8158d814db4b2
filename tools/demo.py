"""Trains a small Mask R-CNN with DTN on the CPU, using generated images, and shows its predictions.

The demo generates the data, trains in two processes, and computes COCO metrics on held-out images. Then it draws
predictions next to the ground truth, reports what the DTN layers do, and writes a summary. The file log.txt in the work
directory contains the output of MMEngine and MMDetection.

Example:
    python tools/demo.py
"""

import argparse
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

os.environ['CUDA_VISIBLE_DEVICES'] = ''  # must precede the import of torch, so that the demo always runs on the CPU

import mmcv
import torch
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.runner import Runner

from mmdtn.datasets import TRAIN, VAL, write_coco
from mmdtn.errors import readable_errors
from mmdtn.reports.enlarge import enlarge

TOOLS = Path(__file__).resolve().parent
CONFIG = TOOLS.parent / 'configs' / 'demo' / 'mask-rcnn_pvt-dtn_shapes.py'
# For such small feature maps, two processes with one thread each are faster than one process with two threads.
PROCESSES = 2
PICTURES = 12
ENLARGED = 3  # factor by which the pictures are larger than the images
ANALYZED = 4
SCORE = 0.5  # minimum score of drawn predictions
FIRST_SCORE = 0.3  # minimum score after the first epoch, when scores are still low
# AP and AP50 of the same detector with LayerNorm, as in README.md, followed by the training command.
LAYERNORM = dict(bbox=(0.461, 0.691), segm=(0.383, 0.647))
TRAIN_LAYERNORM = 'tools/dist_train.sh configs/demo/mask-rcnn_pvt-ln_shapes.py 2'


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data', default='data/shapes', help='directory of the generated data (default: %(default)s)')
    parser.add_argument('--work-dir', default='work_dirs/demo', help='directory for all results (default: %(default)s)')
    parser.add_argument('--train', type=int, default=TRAIN, help='number of training images (default: %(default)s)')
    parser.add_argument('--val', type=int, default=VAL, help='number of held-out images (default: %(default)s)')
    parser.add_argument('--epochs', type=int, help='number of epochs (default: that of the config)')
    parser.add_argument('--debug', action='store_true', help='show the traceback of every error')
    return parser.parse_args()


def load_config(data: Path, work_dir: Path, epochs: int | None) -> Config:
    cfg = Config.fromfile(CONFIG)
    cfg.work_dir = str(work_dir)
    cfg.merge_from_dict(settings(data, epochs))
    cfg.val_dataloader = cfg.val_cfg = cfg.val_evaluator = None
    return cfg


def settings(data: Path, epochs: int | None) -> dict[str, object]:
    changed: dict[str, object] = {
        'train_dataloader.dataset.data_root': str(data),
        'val_dataloader.dataset.data_root': str(data),
        'test_dataloader.dataset.data_root': str(data),
        'val_evaluator.ann_file': str(data / 'annotations' / 'instances_val.json'),
        'test_evaluator.ann_file': str(data / 'annotations' / 'instances_val.json'),
        'train_cfg.val_interval': 10**6,  # the demo tests only once, at the end
    }
    if epochs is not None:
        changed |= {'train_cfg.max_epochs': epochs, 'param_scheduler.1.T_max': epochs}
    return changed


def train(changed: dict[str, object], work_dir: Path, log: TextIO, look: Callable[[Path], None]) -> Path:
    """Trains with tools/dist_train.sh, and returns the last checkpoint.

    Calls ``look`` with the checkpoint of the first epoch.
    """
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = str(free.getsockname()[1])
    command = ['bash', TOOLS / 'dist_train.sh', CONFIG, str(PROCESSES), '--work-dir', work_dir, '--cfg-options']
    with subprocess.Popen(
        [*command, *(f'{key}={value}' for key, value in changed.items())],
        env=dict(os.environ, PYTHON=sys.executable, PORT=port, OMP_NUM_THREADS='1'),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as training:
        assert training.stdout is not None
        for line in training.stdout:
            log.write(line)
            if at := re.search(r'Epoch\(train\)\s+\[(\d+)\].* eta: (\S+) .* loss: (\S+)', line):
                print(f'    epoch {at[1]}, loss {float(at[3]):.2f}, {at[2]} left', flush=True)
            elif 'Saving checkpoint at 1 epochs' in line:
                first = work_dir / 'epoch_1.pth'
                while not first.exists() and training.poll() is None:
                    time.sleep(0.1)
                if first.exists():
                    look(first)
    if training.returncode != 0:
        print(''.join(Path(log.name).read_text().splitlines(keepends=True)[-30:]))
        raise SystemExit(f'FAILED: training. The full output is in {log.name}')
    return Path((work_dir / 'last_checkpoint').read_text())


@contextlib.contextmanager
def quietly(log: TextIO) -> Iterator[None]:
    """Redirects printed output to the log."""
    with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        yield


def draw(runner: Runner, folder: Path, pictures: int, score: float) -> None:
    """Draws the first held-out images with the ground truth on the left and the predictions on the right."""
    dataset = runner.test_dataloader.dataset
    runner.visualizer.dataset_meta = dataset.metainfo
    for i in range(min(pictures, len(dataset))):
        with torch.no_grad():
            (sample,) = runner.model.test_step(pseudo_collate([dataset[i]]))
        path = Path(sample.img_path)
        image = enlarge(mmcv.imread(path, channel_order='rgb'), sample, ENLARGED)
        runner.visualizer.add_datasample(
            path.stem, image, sample, pred_score_thr=score, out_file=str(folder / f'{path.stem}.png')
        )


def analyze(checkpoint: Path, data: Path, folder: Path, log: TextIO) -> Path:
    """Runs tools/analysis_tools/analyze_dtn.py on the trained model, and returns the HTML report."""
    images = data / 'annotations' / 'instances_val.json'
    command = [sys.executable, TOOLS / 'analysis_tools' / 'analyze_dtn.py', CONFIG, checkpoint]
    options = ['--images', images, '--number', str(ANALYZED), '--out', folder]
    done = subprocess.run([*map(str, [*command, *options])], stdout=log, stderr=log)
    if done.returncode != 0:
        raise SystemExit(f'FAILED: the report. The full output is in {log.name}')
    return folder / 'report.html'


def figures(metrics: dict[str, float], comparable: bool) -> str:
    """Formats the metrics of DTN, and those of LayerNorm if both were trained equally long on the same data."""
    lines = []
    for kind, name in (('bbox', 'box'), ('segm', 'mask')):
        ap, ap50 = (metrics[f'coco/{kind}_mAP{suffix}'] for suffix in ('', '_50'))
        known = '   with LayerNorm {:.3f}, {:.3f}'.format(*LAYERNORM[kind]) if comparable else ''
        lines.append(f'  {name + " AP":12}{ap:.3f}   AP50 {ap50:.3f}{known}')
    if comparable:
        lines.append(f'\n  LayerNorm was trained by: PYTHON={sys.executable} {TRAIN_LAYERNORM}')
    return '\n'.join(lines)


def minutes(seconds: float) -> str:
    return f'{int(seconds) // 60} min {int(seconds) % 60:02} s'


def run(args: argparse.Namespace) -> None:
    started = time.monotonic()
    torch.set_num_threads(1)
    work_dir = Path(args.work_dir)
    pictures, first_look = work_dir / 'pictures', work_dir / 'after_epoch_1'
    for folder in (pictures, first_look):
        folder.mkdir(parents=True, exist_ok=True)

    print(f'==> data: {args.train} generated training images and {args.val} held-out images in {args.data}', flush=True)
    data = write_coco(args.data, args.train, args.val)
    cfg = load_config(data, work_dir, args.epochs)
    with (work_dir / 'log.txt').open('w', buffering=1) as log:
        with quietly(log):
            runner = Runner.from_cfg(cfg)

        def look(checkpoint: Path) -> None:
            with quietly(log):
                runner.load_checkpoint(str(checkpoint))
                draw(runner, first_look, 1, FIRST_SCORE)
            print(f'    predictions after one epoch: {min(first_look.iterdir())}', flush=True)

        print(f'==> training: {cfg.train_cfg.max_epochs} epochs in {PROCESSES} processes; log: {log.name}', flush=True)
        checkpoint = train(settings(data, args.epochs), work_dir, log, look)
        print(f'==> testing on the {args.val} held-out images, and drawing {PICTURES} of them', flush=True)
        with quietly(log):
            runner.load_checkpoint(str(checkpoint))
            metrics = runner.test()
            draw(runner, pictures, PICTURES, SCORE)
        print(f'    predictions now: {min(pictures.iterdir())}', flush=True)
        print('==> analysing the DTN layers', flush=True)
        report = analyze(checkpoint, data, work_dir / 'report', log)
    (work_dir / 'summary.json').write_text(json.dumps(metrics, indent=1))

    defaults = (args.train, args.val, args.epochs) == (TRAIN, VAL, None)
    print(f"""
Demo finished in {minutes(time.monotonic() - started)}.

{figures(metrics, comparable=defaults)}

  pictures    {pictures} (left the truth, right what was found)
  report      {report} (where its DTN layers looked)
  checkpoint  {checkpoint}
  metrics     {work_dir / 'summary.json'}

Next steps on GPUs, with COCO in the place that MMDetection expects (configs/pvt/README.md):
  {sys.executable} tools/train.py configs/pvt/mask-rcnn_pvt-t-dtn_fpn_1x_coco.py""")


def main() -> None:
    args = parse_args()
    with readable_errors(args.debug):
        run(args)


if __name__ == '__main__':
    main()
