"""Shows the training images of a config after its pipeline has processed them.

MMDetection's visualizer draws the boxes and masks of detection datasets. MMPretrain's visualizer draws the labels of
classification datasets.

Example:
    python tools/analysis_tools/browse_dataset.py CONFIG --out DIR
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.config import Config, DictAction
from mmengine.registry import DATASETS, VISUALIZERS
from mmengine.runner import set_random_seed

from mmdtn.errors import UserError, readable_errors
from mmdtn.models import read_config
from mmdtn.registry import package_of
from mmdtn.reports.enlarge import enlarge

SMALLEST = 480  # longer side in pixels; smaller images are enlarged to keep labels readable


def browse(cfg: Config, split: str, out: Path, number: int) -> list[Path]:
    """Draws images spread evenly over the dataset, and returns the files written."""
    if not cfg.get(f'{split}_dataloader'):
        raise UserError(f'the config has no {split}_dataloader.')
    set_random_seed(cfg.get('randomness', {}).get('seed') or 0)
    dataset = DATASETS.build(cfg[f'{split}_dataloader'].dataset)
    if len(dataset) == 0:
        raise UserError(f'the {split} dataset is empty.')
    labels = package_of(type(dataset[0]['data_samples'])) == 'mmpretrain'
    kind = 'mmpretrain.UniversalVisualizer' if labels else 'mmdet.DetLocalVisualizer'
    visualizer = VISUALIZERS.build(dict(type=kind, name=f'browse {out}'))
    visualizer.dataset_meta = dataset.metainfo
    out.mkdir(parents=True, exist_ok=True)
    count = min(number, len(dataset))
    written = []
    for i in (i * len(dataset) // count for i in range(count)):
        data = dataset[i]
        sample = data['data_samples']
        name = Path(sample.get('img_path') or 'image').stem
        path = out / f'{i:06d}_{name}.png'
        # MMEngine's datasets read image files as BGR. Images from an archive, as in CIFAR, are RGB.
        image = data['inputs'].permute(1, 2, 0).numpy()
        image = image[..., ::-1] if sample.get('img_path') else image
        draw = _draw_labels if labels else _draw_boxes
        draw(visualizer, np.ascontiguousarray(image), sample, path)
        written.append(path)
    return written


def _draw_labels(visualizer: Any, image: np.ndarray, sample: Any, path: Path) -> None:
    scale = max(1, -(-SMALLEST // max(image.shape[:2])))
    visualizer.visualize_cls(image, sample, rescale_factor=scale, out_file=str(path))


def _draw_boxes(visualizer: Any, image: np.ndarray, sample: Any, path: Path) -> None:
    scale = max(1, -(-SMALLEST // max(image.shape[:2])))
    visualizer.add_datasample(path.stem, enlarge(image, sample, scale), sample, draw_pred=False, out_file=str(path))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config')
    parser.add_argument('--out', '--output-dir', type=Path, required=True, help='directory for the images')
    parser.add_argument('--split', '--phase', choices=['train', 'val', 'test'], default='train')
    parser.add_argument(
        '--number',
        '--show-number',
        type=int,
        default=20,
        help='number of images, spread evenly over the dataset (default: %(default)s)',
    )
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='settings to override, as in a.b=1 c=[2,3]')
    parser.add_argument('--debug', action='store_true', help='show the traceback of every error')
    args = parser.parse_args(arguments)
    if args.number < 1:
        parser.error(f'--number {args.number}: give at least 1')
    with readable_errors(args.debug):
        cfg = read_config(args.config, args.cfg_options)
        print(f'written: {len(browse(cfg, args.split, args.out, args.number))} images in {args.out}')


if __name__ == '__main__':
    main()
