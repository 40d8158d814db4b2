"""Enlarges small images with their boxes and masks, so that drawn boxes and labels are readable."""

from typing import Any

import numpy as np


def enlarge(image: np.ndarray, sample: Any, scale: int) -> np.ndarray:
    """Returns the image enlarged by the factor ``scale``. Boxes and masks of ``sample`` are scaled in place.

    ``sample`` is a ``DetDataSample`` of MMDetection.
    """
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
