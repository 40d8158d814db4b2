"""Hooks that check whether a checkpoint fits the model."""

from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mmdtn.backbones.base import Backbone
from mmdtn.checkpoints import backbone_settings
from mmdtn.checkpoints.origin import check_origin
from mmdtn.errors import UserError
from mmdtn.norms import start_new_task

NAMED = 4  # number of mismatches that an error names
OF_DTN = ('mean_mix', 'var_mix', 'position')


@HOOKS.register_module()
class CheckWeightsHook(Hook):
    """Hook that rejects checkpoints that do not fit the model.

    A checkpoint does not fit if it lacks parameters, has different shapes, or has DTN parameters that the model lacks.
    If the checkpoint contains a config, its backbone must also have the model's eps, heads and class token. In these
    cases, MMEngine only logs a warning, and the metrics look like those of a bad model.
    """

    priority = 'VERY_HIGH'
    hint = ''

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        model = runner.model
        if is_model_wrapper(model) and not isinstance(model, DistributedDataParallel):
            return  # the parameters are sharded
        model = getattr(model, 'module', model)  # unwraps DDP and test-time augmentation
        state = checkpoint.get('state_dict', checkpoint)
        found = {key.removeprefix('module.'): value for key, value in state.items()}
        if wrong := self.misfits(model, found) or another_origin(model, checkpoint):
            more = f'; and {len(wrong) - NAMED} more' if len(wrong) > NAMED else ''
            raise UserError(
                f'{runner.cfg.get("load_from")} is not a checkpoint of the model of {runner.cfg.filename}: '
                f'{"; ".join(wrong[:NAMED])}{more}{self.hint}'
            )

    def misfits(self, model: nn.Module, state: dict) -> list[str]:
        """Loads the state dict, and returns a description of each mismatch.

        During loading, modules translate the names of older checkpoints.
        """
        try:
            missing, unexpected = model.load_state_dict(state, strict=False)
        except RuntimeError as error:
            return [line.strip(' \t.') for line in str(error).splitlines()[1:]]
        return self.lacks(model, missing, unexpected)

    def lacks(self, model: nn.Module, missing: list[str], unexpected: list[str]) -> list[str]:
        parameters = dict(model.named_parameters())
        wrong = [f'the file has no {key}' for key in missing if key in parameters]
        return wrong + [f'the model has no {key}' for key in unexpected if key.rpartition('.')[2] in OF_DTN]


def another_origin(model: nn.Module, checkpoint: dict) -> list[str]:
    """Returns the differences between the backbone and the backbone config in the checkpoint."""
    backbone = getattr(model, 'backbone', model)
    try:
        settings = backbone_settings(checkpoint)
        if settings is not None and isinstance(backbone, Backbone):
            check_origin(settings, backbone)
    except ValueError as error:
        return [str(error)]
    return []


@HOOKS.register_module()
class StartFromWeightsHook(CheckWeightsHook):
    """Hook that starts a new training run from a checkpoint, which may lack some weights.

    Norms that count training steps start again at 0.
    """

    hint = (
        '. For a new head with other classes, use --cfg-options load_from=FILE instead, which skips tensors that do '
        'not fit.'
    )

    def lacks(self, model: nn.Module, missing: list[str], unexpected: list[str]) -> list[str]:
        if len(missing) < len(model.state_dict()):
            return []
        return [
            f'none of its tensors has the name of a tensor of the model; it has {", ".join(unexpected[:3])}. Convert '
            'published files with tools/model_converters/convert.py first'
        ]

    def before_train(self, runner: Runner) -> None:
        start_new_task(runner.model)
