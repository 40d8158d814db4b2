"""Groups validation images by the first exit of a cascade that classifies them correctly.

The figure has a row for each exit. For each class, a row contains the most confident images that its exit classifies
correctly and no earlier exit does. The first row has easy images, and the last row has images that need all exits.

Example:
    python tools/analysis_tools/browse_exits.py CONFIG CHECKPOINT --out exits.png
"""

import argparse
from collections import Counter
from pathlib import Path
from typing import cast

import mmcv
from mmengine.config import Config, DictAction
from mmengine.dataset import BaseDataset
from numpy.typing import NDArray

from mmdtn.dvt.answers import Answers, answers, build_loader, load_cascade
from mmdtn.errors import readable_errors
from mmdtn.models import read_config
from mmdtn.reports.exits import examples
from mmdtn.reports.figures import COLUMNS


def first_right(found: Answers, labels: list[int], number: int) -> list[int]:
    """Returns the images that exit ``number``, counted from 0, classifies correctly and no earlier exit does.

    The most confident images of all classes come first, then the second most confident images, and so on.
    """
    chosen = found.hit[number] & ~found.hit[:number].any(0)
    surest = [i for i in found.conf[number].argsort(descending=True, stable=True).tolist() if chosen[i]]
    of_class: Counter[int] = Counter()
    ranks = []
    for i in surest:
        ranks.append(of_class[labels[i]])
        of_class[labels[i]] += 1
    return [i for _, i in sorted(zip(ranks, surest, strict=True), key=lambda pair: pair[0])]


def image_and_class(dataset: BaseDataset, index: int) -> tuple[NDArray, str]:
    info = dataset.get_data_info(index)
    image = info['img'] if 'img' in info else mmcv.imread(info['img_path'], channel_order='rgb')
    classes = dataset.metainfo.get('classes')
    return image, str(info['gt_label']) if classes is None else classes[info['gt_label']].partition(',')[0]


def browse(cfg: Config, checkpoint: str, out: Path) -> None:
    model = load_cascade(cfg, checkpoint)
    loader = build_loader(cfg, 'val_dataloader')
    found = answers(model, loader)
    dataset = cast(BaseDataset, loader.dataset)
    labels = [dataset.get_data_info(i)['gt_label'] for i in range(len(dataset))]
    rows = {}
    for k in range(len(found.conf)):
        chosen = first_right(found, labels, k)
        print(f'exit {k + 1} is the first that is right for {len(chosen)} of {len(labels)} images')
        rows[f'exit {k + 1}'] = [image_and_class(dataset, index) for index in chosen[:COLUMNS]]
    print(f'no exit is right for {int((~found.hit.any(0)).sum())}')
    out.parent.mkdir(parents=True, exist_ok=True)
    examples(rows).savefig(out)
    print(f'written: {out}')


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('config')
    parser.add_argument('checkpoint')
    parser.add_argument('--out', type=Path, required=True, help='image file to write, such as exits.png')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='settings to override, as in a.b=1 c=[2,3]')
    parser.add_argument('--debug', action='store_true', help='show the traceback of every error')
    args = parser.parse_args(arguments)
    with readable_errors(args.debug):
        browse(read_config(args.config, args.cfg_options), args.checkpoint, args.out)


if __name__ == '__main__':
    main()
