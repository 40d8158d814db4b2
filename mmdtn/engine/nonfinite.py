"""Stops a run whose loss is NaN or infinite, and finds out where that began."""

import functools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from mmengine.dist import all_reduce, get_rank, is_distributed
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import Tensor, nn

from .errors import UserError


class NonFiniteError(UserError):
    """A loss, or weights about to be saved, that are NaN or infinite."""


@HOOKS.register_module()
class StopOnNonFiniteHook(Hook):
    """Ends the run before a NaN or infinite loss reaches the weights, and before such weights reach a checkpoint.

    The error names the iteration, the images and the layer: the step is run again, with the same random numbers, and
    the output of every layer looked at. The check stands before the optimizer's step, when the backward pass is
    under way already, so a GPU is hardly kept waiting.
    """

    priority = 'HIGH'  # after SeedByNumberHook

    def before_train(self, runner: Runner) -> None:
        self.loss: Tensor | None = None
        wrapper = runner.optim_wrapper
        update_params, step = wrapper.update_params, wrapper.step

        def note_loss(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            self.loss = loss.detach()
            update_params(loss, *args, **kwargs)

        @functools.wraps(step)  # with the mark that schedulers leave on it
        def step_if_finite(*args: Any, **kwargs: Any) -> None:
            self._check_loss(runner)
            step(*args, **kwargs)

        # On the object, not the class: the optimizer wrapper may be of any type.
        wrapper.update_params, wrapper.step = note_loss, step_if_finite

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        self.batch = data_batch
        self.random_state = _get_random_state()

    def _check_loss(self, runner: Runner) -> None:
        loss, self.loss = self.loss, None
        if loss is None:
            return
        finite = loss.isfinite().all()
        # A loss on one process poisons the gradients of all. They stop together, because a step run again by one
        # alone would wait for the others wherever the model averages over processes.
        everywhere = finite.float()
        if is_distributed():
            all_reduce(everywhere, 'min')
        if everywhere.item() == 1:
            return
        _set_random_state(self.random_state)
        where = first_nonfinite_layer(runner, self.batch)
        if not finite:
            images = ', '.join(_image_names(self.batch)) or 'images without names'
            raise NonFiniteError(
                f'the loss is {loss.item()} in iteration {runner.iter + 1} with {images}; first in {where}. '
                'The weights are those before this step, and the last checkpoint is intact.'
            )
        raise NonFiniteError(f'the loss of another process than {get_rank()} is not finite.')

    def after_train_iter(self, runner: Runner, *args: Any, **kwargs: Any) -> None:
        self._check_loss(runner)  # while gradients accumulate, there is no step

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """A finite loss can have a gradient that is not; the weights are then ruined one step before the loss."""
        ruined = [name for name, value in checkpoint['state_dict'].items() if not _is_finite(value)]
        if ruined:
            raise NonFiniteError(
                f'weights are not finite after iteration {runner.iter + 1}, so no checkpoint is written: '
                f'{ruined[0]}{f" and {len(ruined) - 1} more" if ruined[1:] else ""}. The last checkpoint is intact.'
            )


def first_nonfinite_layer(runner: Runner, batch: Any) -> str:
    """Runs the forward part of a training step, and names the first layer whose output is not finite."""
    model = runner.model.module if is_model_wrapper(runner.model) else runner.model
    for name, parameter in model.named_parameters():
        if not _is_finite(parameter):
            return f'the weights, at {name}'
    found: list[str] = []

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not found and not all(map(_is_finite, _tensors(output))):
            arrived = '' if all(map(_is_finite, _tensors(inputs))) else ', whose input was not finite already'
            found.append(f'{name} ({type(module).__name__}){arrived}')

    # A layer is done before the one that holds it, so the innermost comes first.
    handles = [
        module.register_forward_hook(lambda m, i, o, name=name: look(name, m, i, o))
        for name, module in model.named_modules()
        if name
    ]
    try:
        with torch.no_grad(), runner.optim_wrapper.optim_context(runner.model):
            model._run_forward(model.data_preprocessor(batch, True), mode='loss')
    except Exception as error:
        return found[0] if found else f'a step that, run again, failed with {error!r}'
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else 'the computation of the loss, after the last layer'


def _is_finite(value: Any) -> bool:
    return not (isinstance(value, Tensor) and value.is_floating_point()) or bool(value.isfinite().all())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _image_names(batch: Any) -> Iterator[str]:
    """From the data samples, wherever they are in the batch."""
    if hasattr(batch, 'metainfo'):
        names = batch.metainfo
        yield str(names.get('img_path', f'image {names.get("img_id", names.get("sample_idx", "?"))}'))
    elif isinstance(batch, dict):
        for part in batch.values():
            yield from _image_names(part)
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from _image_names(part)


def _get_random_state() -> tuple:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def _set_random_state(state: tuple) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    if state[3] is not None:
        torch.cuda.set_rng_state(state[3])
