"""A new training from the weights of another one."""

from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import Tensor

from mmdtn.errors import UserError
from mmdtn.norms import start_new_task

NAMED = 5  # of the tensors that do not fit


@HOOKS.register_module()
class StartFromWeightsHook(Hook):
    """Refuses a ``load_from`` whose tensors do not fit the model, which mmengine would leave out with a warning.

    Norms that count training steps start at 0. Of tensors that only the model or only the file has mmengine tells.
    """

    priority = 'VERY_HIGH'

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        state = checkpoint.get('state_dict', checkpoint)
        found = {key.removeprefix('module.'): value for key, value in state.items()}
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        wanted = model.state_dict()
        shared = found.keys() & wanted.keys()
        if not shared:
            raise UserError(
                f'--weights {runner.cfg.load_from}: none of its tensors has the name of one of the model; it has '
                f'{", ".join(list(found)[:3])}. Published files go through tools/model_converters/convert.py first.'
            )
        wrong = [
            f'{key} is {_shape(found[key])} in the file and {_shape(wanted[key])} in the model'
            for key in wanted
            if key in shared and found[key].shape != wanted[key].shape
        ]
        if wrong:
            more = f'; and {len(wrong) - NAMED} more' if len(wrong) > NAMED else ''
            raise UserError(
                f'--weights {runner.cfg.load_from} does not fit {runner.cfg.filename}: {"; ".join(wrong[:NAMED])}{more}'
                '. For a new head, of other classes, give the file as --cfg-options load_from=FILE instead: what does '
                'not fit is left out then.'
            )

    def before_train(self, runner: Runner) -> None:
        start_new_task(runner.model)


def _shape(tensor: Tensor) -> str:
    return ' x '.join(map(str, tensor.shape)) or 'a number'
