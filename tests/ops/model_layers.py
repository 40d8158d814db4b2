"""The DTN layers that models launch: recorded from forward passes on fake CUDA tensors."""

import math
from collections.abc import Iterator

import timm
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mmdtn import convert_norms
from mmdtn.backbones import levit, pvt, swin, t2t, vit
from mmdtn.backbones.levit import LeViTDTN
from mmdtn.backbones.pvt import PVTDTN
from mmdtn.backbones.swin import SwinDTN
from mmdtn.backbones.t2t import T2TViTDTN
from mmdtn.backbones.vit import ViTDTN
from mmdtn.benchmarks.no_gpu import Layer
from mmdtn.ops import Settings

ARCHS = {PVTDTN: pvt.ARCHS, SwinDTN: swin.ARCHS, ViTDTN: vit.ARCHS, T2TViTDTN: t2t.ARCHS, LeViTDTN: levit.ARCHS}
CONVERTED = ['vit_small_patch16_224', 'swin_tiny_patch4_window7_224', 'pvt_v2_b0']  # of timm
DETECTORS = (PVTDTN, SwinDTN)


class Recorder(TorchDispatchMode):
    """Collects the layers whose operator is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: set[Layer] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.mmdtn.dtn.default:
            x, *_, position, dtype = args[:7]
            self.layers.add(Layer(*x.shape, len(position), Settings(*args[7:]), (x.dtype, dtype)))
        return func(*args, **(kwargs or {}))


def layers_of(model: nn.Module, images: tuple[int, int, int]) -> set[Layer]:
    """Batch, height and width of images to the layers of a forward pass."""
    batch, height, width = images
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    with FakeTensorMode(), torch.device('cuda'), torch.no_grad(), Recorder() as recorder:
        state = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in tensors.items()}
        torch.func.functional_call(model, state, (torch.empty(batch, 3, height, width),))
    assert recorder.layers
    return recorder.layers


def models() -> Iterator[tuple[nn.Module, list[tuple[int, int, int]]]]:
    """Each registered architecture, and models that were converted, with sizes of images that they are used at."""
    for backbone, archs in ARCHS.items():
        for arch in archs:
            detects = backbone in DETECTORS and arch in ('tiny', 'small', 'v2-b0', 'v2-b2')
            with FakeTensorMode():
                model = backbone(arch, out_type='featmap').eval()
            yield model, [(1, 224, 224), *([(2, 800, 1344), (1, 672, 1120)] if detects else [])]
    for name in CONVERTED:
        model = timm.create_model(name).eval()
        convert_norms(model)
        yield model, [(1, 224, 224)]


def all_layers() -> list[Layer]:
    """One layer for each set of compiled kernels: these do not depend on the batch, and little on the size."""
    found = {}
    for model, sizes in models():
        for images in sizes:
            for layer in layers_of(model, images):
                side = max(layer.height, layer.width) / layer.settings.pool_size
                found[layer.channels, layer.heads, layer.settings, math.ceil(math.log2(max(side, 16)))] = layer
    return sorted(found.values(), key=str)
