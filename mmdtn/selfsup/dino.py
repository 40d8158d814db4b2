"""Model, head and loss of DINO, which trains a backbone without labels (arXiv 2104.14294)."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from mmengine.dist import all_reduce
from mmengine.model import BaseModel, BaseModule
from mmengine.registry import MODELS
from timm.layers import trunc_normal_
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from .ema import TeacherEMA
from .knn import image_vectors

GLOBAL_VIEWS = 2  # the teacher sees the first two views of each image


class Distillation(NamedTuple):
    """DINO's loss and its lower bound, the entropy of the teacher."""

    loss: Tensor
    teacher_entropy: Tensor


def dino_loss(
    student: Tensor, teacher: Tensor, centre: Tensor, student_temp: float = 0.1, teacher_temp: float = 0.04
) -> Distillation:
    """Computes the cross-entropy between the outputs of teacher and student for different views of an image.

    The loss is the mean of ``-sum_k q_i[k] log p_v[k]`` over the batch and over all pairs of teacher view ``i`` and
    student view ``v != i``, where ``q_i = softmax((teacher_i - centre) / teacher_temp)`` and ``p_v = softmax(student_v
    / student_temp)``. Half-precision inputs are converted to float32.

    Args:
        student: Outputs of the student, ``V x B x K``. The first two views are those of the teacher.
        teacher: Outputs of the teacher, ``2 x B x K``. They are detached from the graph.
        centre: Centre of the teacher's outputs, ``K``.
        student_temp: Temperature of the student.
        teacher_temp: Temperature of the teacher.
    """
    student, teacher = _at_least_float32(student), _at_least_float32(teacher.detach())
    log_p = (student / student_temp).log_softmax(-1)
    log_q = ((teacher - centre) / teacher_temp).log_softmax(-1)
    q = log_q.exp()
    others = log_p.sum(0) - log_p[:GLOBAL_VIEWS]  # for each teacher view, the sum over all other views
    loss = -(q * others).sum(-1).mean() / (len(student) - 1)
    return Distillation(loss, -(q * log_q).sum(-1).mean())


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


@MODELS.register_module()
class DINOHead(BaseModule):
    """Projection head of DINO.

    The head consists of three linear layers, L2 normalisation, and a final linear layer with weight normalisation.

    Args:
        in_channels: Number of channels of the backbone's output.
        out_channels: Number of outputs.
        hidden_channels: Width of the first two layers.
        bottleneck_channels: Width of the third layer.
        norm_last_layer: If True, the gain of the last layer stays at 1. If False, the gain is trained.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int = 65536,
        hidden_channels: int = 2048,
        bottleneck_channels: int = 256,
        norm_last_layer: bool = True,
        init_cfg: dict | None = None,
    ) -> None:
        super().__init__(init_cfg)
        self.out_channels = out_channels
        self.mlp = nn.Sequential(
            nn.Linear(in_channels, hidden_channels),
            nn.GELU(),
            nn.Linear(hidden_channels, hidden_channels),
            nn.GELU(),
            nn.Linear(hidden_channels, bottleneck_channels),
        )
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        # After a forward pass, the older torch.nn.utils.weight_norm does not support deepcopy.
        self.last_layer = weight_norm(nn.Linear(bottleneck_channels, out_channels, bias=False))
        gain = self.last_layer.parametrizations.weight.original0
        nn.init.ones_(gain)
        gain.requires_grad_(not norm_last_layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.last_layer(F.normalize(self.mlp(x), dim=-1))


class BackboneAndHead(BaseModule):
    """Backbone that returns one vector per image, followed by a head. Student and teacher use this class."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, views: Sequence[Tensor]) -> Tensor:
        """Computes outputs of shape ``V x B x K`` for ``V`` views of ``B`` images.

        The backbone processes consecutive views of equal size together. The head processes all views together.
        """
        groups = [torch.cat(list(group)) for _, group in groupby(views, key=lambda view: view.shape[2:])]
        vectors = torch.cat([image_vectors(self.backbone(images)) for images in groups])
        return self.head(vectors).unflatten(0, (len(views), -1))


@MODELS.register_module()
class DINO(BaseModel):
    """Trains a backbone to return the same output for different views of an image (DINO, arXiv 2104.14294).

    The student sees all views. The teacher is a moving average of the student and sees only the first two views.
    Training requires :class:`DINOHook`, which updates the teacher and clips the gradients. All modes except ``'loss'``
    use the teacher's backbone.

    The log also shows ``teacher_entropy``, the entropy of the teacher's output. If the entropy is close to 0 or to
    ``log K``, training has collapsed. The value ``kl`` is the divergence of the student from the teacher, and
    ``centre_norm`` is the norm of the centre.

    Args:
        backbone: Config of a backbone whose last output is a vector ``B x C`` or a map. Maps are averaged.
        head: Config of the head, see :class:`DINOHead`.
        student_temp: Temperature of the student.
        teacher_temp: Temperature of the teacher. :class:`DINOHook` can warm it up.
        teacher_momentum: Momentum of the moving average at the first step.
        centre_momentum: Momentum of the centre.
        data_preprocessor: Config of a preprocessor for lists of views, such as ``SelfSupDataPreprocessor``.
    """

    centre: Tensor

    def __init__(
        self,
        backbone: dict,
        head: dict,
        student_temp: float = 0.1,
        teacher_temp: float = 0.04,
        teacher_momentum: float = 0.996,
        centre_momentum: float = 0.9,
        data_preprocessor: dict | nn.Module | None = None,
        init_cfg: dict | None = None,
    ) -> None:
        super().__init__(data_preprocessor, init_cfg)
        projection = MODELS.build(head)
        self.student = BackboneAndHead(MODELS.build(backbone), projection)
        self.teacher = TeacherEMA(self.student, teacher_momentum)
        self.student_temp = student_temp
        self.teacher_temp = teacher_temp
        self.centre_momentum = centre_momentum
        self.register_buffer('centre', torch.zeros(projection.out_channels))

    def init_weights(self) -> None:
        super().init_weights()
        self.teacher.copy(self.student)

    def forward(self, inputs: Any, data_samples: list | None = None, mode: str = 'tensor') -> Any:
        """Runs the model in one of MMEngine's modes.

        Args:
            inputs: List of views, ``B x 3 x H x W`` each, for ``mode='loss'``. Other modes expect one such tensor.
            data_samples: Data samples of the images, to which ``mode='predict'`` adds the field ``feature``.
            mode: ``'loss'``, ``'tensor'`` or ``'predict'``.
        """
        if mode == 'loss':
            return self.loss(inputs)
        features = self.extract_feat(inputs)
        if mode == 'tensor':
            return features
        if mode != 'predict':
            raise ValueError(f"mode={mode!r} does not exist. Choose 'loss', 'tensor' or 'predict'.")
        samples = data_samples or []
        for sample, vector in zip(samples, image_vectors(features), strict=True):
            sample.set_field(vector, 'feature')
        return samples

    def extract_feat(self, images: Tensor) -> Any:
        """Returns the outputs of the teacher's backbone."""
        return self.teacher.module.backbone(images)

    def loss(self, views: Sequence[Tensor]) -> dict[str, Tensor]:
        """Computes the loss and the values to log. Updates the centre in training mode."""
        if isinstance(views, Tensor) or len(views) < GLOBAL_VIEWS:
            found = f'a tensor of shape {tuple(views.shape)}' if isinstance(views, Tensor) else f'{len(views)} views'
            raise ValueError(
                f'DINO takes a list of at least {GLOBAL_VIEWS} views of each image, but got {found}. Add MultiView to '
                "the training pipeline and collate_fn=dict(type='default_collate') to the loader."
            )
        student = self.student(views)
        with torch.no_grad():
            teacher = self.teacher(views[:GLOBAL_VIEWS])
        distillation = dino_loss(student, teacher, self.centre, self.student_temp, self.teacher_temp)
        if self.training:
            self.move_centre(teacher)
        return dict(
            loss=distillation.loss,
            teacher_entropy=distillation.teacher_entropy,
            kl=distillation.loss.detach() - distillation.teacher_entropy,
            centre_norm=self.centre.norm(),
        )

    @torch.no_grad()
    def move_centre(self, teacher: Tensor) -> None:
        """Moves the centre towards the teacher's mean output over all views, images and processes."""
        mean = teacher.to(self.centre.dtype).mean((0, 1))
        all_reduce(mean, 'mean')
        self.centre.lerp_(mean, 1 - self.centre_momentum)
