"""A checkpoint that is to be tested, or gone on from, is of the model."""

from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mmdtn.errors import UserError

NAMED = 4  # of the tensors that do not fit
OF_DTN = ('mean_mix', 'var_mix', 'position')


@HOOKS.register_module()
class CheckWeightsHook(Hook):
    """Refuses a checkpoint that lacks parameters of the model, or has them in other shapes, or those of other norms.

    mmengine takes what fits and leaves a warning in the log; the numbers that follow look like a bad model's.
    """

    priority = 'VERY_HIGH'

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        model = runner.model
        if is_model_wrapper(model) and not isinstance(model, DistributedDataParallel):
            return  # its parameters are in parts
        state = checkpoint.get('state_dict', checkpoint)
        found = {key.removeprefix('module.'): value for key, value in state.items()}
        if wrong := misfits(getattr(model, 'module', model), found):  # of DDP, and of test-time augmentation
            more = f'; and {len(wrong) - NAMED} more' if len(wrong) > NAMED else ''
            raise UserError(
                f'{runner._load_from} is not a checkpoint of the model of {runner.cfg.filename}: '
                f'{"; ".join(wrong[:NAMED])}{more}'
            )


def misfits(model: nn.Module, state: dict) -> list[str]:
    """Loads it: modules that read older files translate names as they do."""
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        return [line.strip(' \t.') for line in str(error).splitlines()[1:]]
    parameters = dict(model.named_parameters())
    wrong = [f'the file has no {key}' for key in missing if key in parameters]
    return wrong + [f'the model has no {key}' for key in unexpected if key.rpartition('.')[2] in OF_DTN]
