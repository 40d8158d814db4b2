"""Checks that mmcv has its C++ ops, and that a compiler optimised them: python requirements/check_mmcv.py

Compares mmcv's `nms` with that of torchvision, which comes compiled. The same loop takes the same time if both are
optimised. Compiled without -O2, mmcv's takes three times as long.
"""

import sys
import timeit

import torch
import torchvision
from mmcv.ops import nms

SLOWER = 2

torch.set_num_threads(1)
corners = torch.rand(3000, 2, generator=torch.Generator().manual_seed(0)) * 800
boxes = torch.cat([corners, corners + 50], 1)
scores = torch.linspace(1, 0, len(boxes))
ours = min(timeit.repeat(lambda: nms(boxes, scores, 0.5), number=1, repeat=9))
theirs = min(timeit.repeat(lambda: torchvision.ops.nms(boxes, scores, 0.5), number=1, repeat=9))
print(f'mmcv.ops.nms takes {ours * 1000:.0f} ms, torchvision.ops.nms {theirs * 1000:.0f} ms')
if ours > SLOWER * theirs:
    sys.exit(f'mmcv was compiled without optimisation: its nms takes {ours / theirs:.1f} times as long as it should')
