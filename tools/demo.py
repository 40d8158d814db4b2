"""Trains a small Mask R-CNN with DTN on generated pictures, on the CPU, and shows what it finds: python tools/demo.py

Data, training, COCO metrics on pictures that were held out, predictions drawn beside the truth, a summary. What
MMEngine and MMDetection print goes to log.txt in the work dir.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

# Threads that wait for each other by spinning cost more than they bring where cores are few or shared.
os.environ.setdefault('OMP_WAIT_POLICY', 'passive')

import mmcv
import torch
from mmengine.config import Config, DictAction
from mmengine.dataset import pseudo_collate
from mmengine.hooks import Hook
from mmengine.runner import Runner

from mmdtn.datasets import TRAIN, VAL, write_coco

REPO = Path(__file__).resolve().parents[1]
CONFIG = REPO / 'configs' / 'demo' / 'mask-rcnn_pvt-dtn_shapes.py'
PICTURES = 12
SCORE = 0.5  # what is drawn


class Progress(Hook):
    """A line every few seconds: how far, and how long still."""

    def __init__(self, terminal: TextIO, seconds: float = 15) -> None:
        self.terminal, self.seconds = terminal, seconds

    def before_train(self, runner: Runner) -> None:
        self.started = self.said = time.monotonic()

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        now, done = time.monotonic(), runner.iter + 1
        if outputs is None or now - self.said < self.seconds:
            return
        self.said = now
        left = (now - self.started) / done * (runner.max_iters - done)
        print(
            f'    epoch {runner.epoch + 1} of {runner.max_epochs}, loss {outputs["loss"].item():.2f}, '
            f'about {minutes(left)} left',
            file=self.terminal,
            flush=True,
        )


def minutes(seconds: float) -> str:
    return f'{int(seconds) // 60} min {int(seconds) % 60:02} s'


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data', default='data/shapes', help='generated there unless it is there (%(default)s)')
    parser.add_argument('--work-dir', default='work_dirs/demo', help='for all results (%(default)s)')
    parser.add_argument('--train', type=int, default=TRAIN, help='pictures for training (%(default)s)')
    parser.add_argument('--val', type=int, default=VAL, help='pictures held out (%(default)s)')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, default={}, help='as tools/train.py takes them')
    return parser.parse_args()


def load_config(data: Path, work_dir: Path, options: dict) -> Config:
    cfg = Config.fromfile(CONFIG)
    cfg.work_dir = str(work_dir)
    for loader in (cfg.train_dataloader, cfg.test_dataloader):
        loader.dataset.data_root = str(data)
    cfg.test_evaluator.ann_file = str(data / 'annotations' / 'instances_val.json')
    cfg.val_dataloader = cfg.val_cfg = cfg.val_evaluator = None  # tested once, at the end
    cfg.merge_from_dict(options)
    return cfg


def draw(runner: Runner, folder: Path) -> None:
    """Some held-out pictures: the truth on the left, predictions on the right."""
    dataset = runner.test_dataloader.dataset
    runner.visualizer.dataset_meta = dataset.metainfo
    for i in range(min(PICTURES, len(dataset))):
        with torch.no_grad():
            (sample,) = runner.model.test_step(pseudo_collate([dataset[i]]))
        path = Path(sample.img_path)
        image = mmcv.imread(path, channel_order='rgb')
        runner.visualizer.add_datasample(
            path.stem, image, sample, pred_score_thr=SCORE, out_file=str(folder / f'{path.stem}.png')
        )


def main() -> None:
    args = parse_args()
    started = time.monotonic()
    work_dir = Path(args.work_dir)
    pictures = work_dir / 'pictures'
    pictures.mkdir(parents=True, exist_ok=True)
    log = work_dir / 'log.txt'
    # The maps are small: a thread has too little to do on more cores than a few.
    torch.set_num_threads(min(4, torch.get_num_threads()))

    print(f'==> data: {args.train} generated pictures for training, {args.val} held out, in {args.data}', flush=True)
    data = write_coco(args.data, args.train, args.val)
    cfg = load_config(data, work_dir, args.cfg_options)
    print(
        f'==> training: {cfg.train_cfg.max_epochs} epochs on {torch.get_num_threads()} threads; log: {log}', flush=True
    )
    terminal = sys.stdout
    with log.open('w', buffering=1) as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        runner = Runner.from_cfg(cfg)
        runner.register_hook(Progress(terminal))
        runner.train()
        print(f'==> evaluation: COCO metrics on the {args.val} pictures held out', file=terminal, flush=True)
        metrics = runner.test()
        print(f'==> drawing {pictures}', file=terminal, flush=True)
        draw(runner, pictures)
    checkpoint = (work_dir / 'last_checkpoint').read_text()
    (work_dir / 'summary.json').write_text(json.dumps(metrics, indent=1))

    print(f'\nDemo finished in {minutes(time.monotonic() - started)}.\n')
    for kind, name in (('bbox', 'box'), ('segm', 'mask')):
        ap, ap50 = (metrics[f'coco/{kind}_mAP{suffix}'] for suffix in ('', '_50'))
        print(f'  {name + " AP":12}{ap:.3f}   AP50 {ap50:.3f}')
    print(f"""
  pictures    {pictures} (left the truth, right what was found)
  checkpoint  {checkpoint}
  metrics     {work_dir / 'summary.json'}

Next, on GPUs, with data where MMPretrain and MMDetection expect it (configs/pvt/README.md):
  {sys.executable} tools/train.py configs/pvt/pvt-t-dtn_8xb128_in1k.py
  {sys.executable} tools/train.py configs/pvt/mask-rcnn_pvt-t-dtn_fpn_1x_coco.py""")


if __name__ == '__main__':
    main()
