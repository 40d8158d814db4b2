"""Compares an exported detector with tools/test.py on the validation images of the generated data set.

python -m tests.export.agreement CONFIG CHECKPOINT MODEL.onnx data/shapes
"""

import contextlib
import io
import pickle
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from pycocotools import mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from mmdtn.export.predict import Model
from tests.training import metrics
from tools.test import main

SIDES = (160, 192, 224, 288, 352)  # lengths to which the longer side of images is resized
PICTURES = 4  # number of images of each size


class Agreement(NamedTuple):
    boxes: int
    unmatched: int  # number of unmatched boxes of both models
    pixels: float  # largest difference of a box
    scores: float
    ap: dict[str, float]  # AP of boxes and masks from tools/test.py
    exported_ap: dict[str, float]


def agreement(config: str, checkpoint: str, exported: Path, data: Path, folder: Path) -> Agreement:
    annotations = data / 'annotations' / 'instances_val.json'
    # In larger batches images are padded to the size of the largest one, which changes the predictions.
    on_data = [f'test_dataloader.dataset.data_root={data}', f'test_evaluator.ann_file={annotations}']
    on_data.append('test_dataloader.batch_size=1')
    model = Model(exported)
    (resize,) = model.about['prepare']
    found = []
    for side in SIDES:
        resize['scale'] = [side, side]
        few = [
            f'test_dataloader.dataset.pipeline.1.scale=({side},{side})',
            f'test_dataloader.dataset.indices={PICTURES}',
        ]
        samples, _ = original(config, checkpoint, folder / str(side), [*on_data, *few])
        found += [match(sample['pred_instances'], model(Image.open(sample['img_path']))) for sample in samples]
    boxes, unmatched, pixels, scores = zip(*found, strict=True)
    samples, measured = original(config, checkpoint, folder / 'all', on_data)
    model = Model(exported)
    ours = {sample['img_id']: model(Image.open(sample['img_path'])) for sample in samples}
    ap = {kind: measured[f'coco/{kind}_mAP'] for kind in ('bbox', 'segm') if f'coco/{kind}_mAP' in measured}
    exported_ap = {kind: average_precision(annotations, ours, kind) for kind in ap}
    return Agreement(sum(boxes), sum(unmatched), max(pixels), max(scores), ap, exported_ap)


def original(config: str, checkpoint: str, folder: Path, options: list[str]) -> tuple[list[dict], dict]:
    """Returns predictions and metrics of tools/test.py."""
    out = folder / 'out.pkl'
    with contextlib.redirect_stdout(io.StringIO()):
        main([config, checkpoint, '--work-dir', str(folder), '--out', str(out), '--cfg-options', *options])
    return pickle.loads(out.read_bytes()), metrics(folder)


def match(theirs: dict, ours: dict) -> tuple[int, int, float, float]:
    """Matches each box with the nearest box of its class.

    Returns the numbers of matched and unmatched boxes and the largest differences in pixels and scores.
    """
    boxes, labels = np.array(ours['boxes']).reshape(-1, 4), np.array(ours['labels'], dtype=int)
    scores, free = np.array(ours['scores']), np.ones(len(labels), dtype=bool)
    pixels, points, matched = [0.0], [0.0], 0
    for box, label, score in zip(
        theirs['bboxes'].numpy(), theirs['labels'].numpy(), theirs['scores'].numpy(), strict=True
    ):
        distance = np.where(free & (labels == label), abs(boxes - box).max(1) + abs(scores - score), np.inf)
        if len(distance) and distance.min() < 1:
            best = distance.argmin()
            free[best] = False
            pixels.append(abs(boxes[best] - box).max())
            points.append(abs(scores[best] - score))
            matched += 1
    return matched, len(theirs['labels']) + len(labels) - 2 * matched, float(max(pixels)), float(max(points))


def average_precision(annotations: Path, found: dict[int, dict], kind: str) -> float:
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(annotations)
        categories = sorted(truth.getCatIds())
        results = [
            dict(image_id=image, category_id=categories[one['labels'][i]], score=one['scores'][i])
            | (dict(bbox=[x, y, x1 - x, y1 - y]) if kind == 'bbox' else dict(segmentation=compressed(one['masks'][i])))
            for image, one in found.items()
            for i, (x, y, x1, y1) in enumerate(one['boxes'])
        ]
        evaluation = COCOeval(truth, truth.loadRes(results), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return float(evaluation.stats[0])


def compressed(code: dict) -> dict:
    return mask.frPyObjects(code, *code['size'])


if __name__ == '__main__':
    with tempfile.TemporaryDirectory() as folder:
        print(agreement(sys.argv[1], sys.argv[2], *map(Path, sys.argv[3:]), Path(folder)))
