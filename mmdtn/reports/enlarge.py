"""Enlarges small images with their annotations and predictions, so that boxes and labels have room on them."""

from typing import Any

import numpy as np


def enlarge(image: np.ndarray, sample: Any, scale: int) -> np.ndarray:
    """Returns the image with each pixel repeated. Scales boxes and masks of MMDetection's ``sample`` in place."""
    for kind in ('gt_instances', 'pred_instances'):
        instances = sample.get(kind)
        if instances is None or 'bboxes' not in instances:
            continue
        instances.bboxes = getattr(instances.bboxes, 'tensor', instances.bboxes) * scale
        if 'masks' in instances:
            masks = instances.masks
            masks = np.asarray(masks.to_ndarray() if hasattr(masks, 'to_ndarray') else masks, dtype=bool)
            instances.masks = masks.repeat(scale, 1).repeat(scale, 2)
    return image.repeat(scale, 0).repeat(scale, 1)
