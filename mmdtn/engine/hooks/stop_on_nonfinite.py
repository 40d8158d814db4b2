"""Hook that stops a run whose loss is NaN or infinite, and finds the first affected layer."""

from collections.abc import Iterator
from typing import Any

import torch
from mmengine.dist import all_reduce, get_rank, is_distributed
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapperDict
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import Tensor, nn

from mmdtn.engine.numbered_batch_sampler import seed_everything
from mmdtn.errors import UserError


class NonFiniteError(UserError):
    """Raised if the loss or a weight to be saved is NaN or infinite."""


@HOOKS.register_module()
class StopOnNonFiniteHook(Hook):
    """Hook that stops a run before a NaN or infinite loss changes the weights, and before damaged weights are saved.

    The error names the iteration, the images and the layer. To find the layer, the hook repeats the forward pass with
    the same random numbers and checks the output of every layer. In contrast, mmdet's ``CheckInvalidLossHook`` checks
    the loss after the optimizer step, when the weights are already lost, and does not name the layer.

    The hook never leaves the GPU idle. Right after the forward pass, the hook queues a flag that tells whether the loss
    is finite. The hook reads the flag before the optimizer step, while the queued backward pass keeps the GPU busy.
    MMEngine waits for the whole step anyway, because it reads the losses for its log at the end of each iteration.

    MMEngine calls no hook between the backward pass and the optimizer step, so a step hook of torch's optimizer reads
    the flag.
    """

    priority = 'HIGH'

    def before_train(self, runner: Runner) -> None:
        self.runner = runner
        self.flag: _Flag | None = None
        wrapper = runner.optim_wrapper
        wrappers = wrapper.values() if isinstance(wrapper, OptimWrapperDict) else [wrapper]
        self.handles = [one.optimizer.register_step_pre_hook(self._check) for one in wrappers]
        self.handles.append(runner.model.register_forward_hook(self._after_forward, with_kwargs=True))

    def after_train(self, runner: Runner) -> None:
        for handle in self.handles:
            handle.remove()

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        self.batch = data_batch

    @torch.no_grad()
    def _after_forward(self, model: nn.Module, args: tuple, kwargs: dict, losses: Any) -> None:
        if kwargs.get('mode') == 'loss' and isinstance(losses, dict):
            self.flag = _Flag(_unwrapped(model).parse_losses(losses)[0])

    def after_train_iter(self, *args: Any, **kwargs: Any) -> None:
        self._check()  # gradient accumulation may have skipped the optimizer step

    def _check(self, *args: Any) -> None:
        flag, self.flag = self.flag, None
        if flag is None or flag.finite_everywhere():
            return
        self.after_train(self.runner)
        seed_everything(self.runner.seed, 0, self.runner.iter)  # as in the resumable loops
        where = first_nonfinite_layer(self.runner, self.batch)
        if flag.loss.isfinite():
            raise NonFiniteError(f'the loss is not finite in a process other than {get_rank()}.')
        images = ', '.join(_image_names(self.batch)) or 'images without names'
        raise NonFiniteError(
            f'the loss is {flag.loss.item()} in iteration {self.runner.iter + 1} with {images}. '
            f'The first value that is not finite is in {where}. The weights are those before this '
            'step, and the last checkpoint is intact.'
        )

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Checks the weights, because even a finite loss can have NaN or infinite gradients."""
        ruined = [name for name, value in checkpoint['state_dict'].items() if not _all_finite(value)]
        if ruined:
            raise NonFiniteError(
                f'weights are not finite after iteration {runner.iter + 1}, so no checkpoint is written: '
                f'{ruined[0]}{f" and {len(ruined) - 1} more" if ruined[1:] else ""}. The last checkpoint is intact.'
            )


class _Flag:
    """Flag that tells whether a loss is finite in all processes.

    All processes stop together. A NaN in one process spreads to the gradients of all processes. If only one process
    repeated a step, it would wait for the others wherever the model averages over processes. On GPUs, the flag is
    reduced on a separate stream, so that no process delays another's backward pass.
    """

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss
        self.event: torch.cuda.Event | None = None
        if not loss.is_cuda:
            self.finite = self._agree()
            return
        stream = torch.cuda.Stream(loss.device)  # torch reuses streams from a pool
        stream.wait_stream(torch.cuda.current_stream(loss.device))
        with torch.cuda.stream(stream):
            self.on_gpu = self._agree()  # this reference keeps the memory alive until the copy is done
            self.finite = self.on_gpu.to('cpu', non_blocking=True)
            self.event = stream.record_event()

    def _agree(self) -> Tensor:
        finite = self.loss.isfinite().float()
        if is_distributed():
            all_reduce(finite, 'min')
        return finite

    def finite_everywhere(self) -> bool:
        if self.event is not None:
            self.event.synchronize()
        return self.finite.item() == 1


def first_nonfinite_layer(runner: Runner, batch: Any) -> str:
    """Repeats the forward pass of a training step, and returns the first layer whose output is not finite."""
    model = _unwrapped(runner.model)
    for name, parameter in model.named_parameters():
        if not _all_finite(parameter):
            return f'the weights, at {name}'
    found: list[str] = []

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not found and not _all_finite(output):
            arrived = '' if _all_finite(inputs) else ', whose input was not finite either'
            found.append(f'{name} ({type(module).__name__}){arrived}')

    # Inner modules finish first, so the search finds the innermost module with a non-finite output.
    handles = [
        module.register_forward_hook(lambda m, i, o, name=name: look(name, m, i, o))
        for name, module in model.named_modules()
        if name
    ]
    try:
        with torch.no_grad(), runner.optim_wrapper.optim_context(runner.model):
            data = model.data_preprocessor(batch, True)
            model(**data, mode='loss') if isinstance(data, dict) else model(*data, mode='loss')
    except Exception as error:
        return found[0] if found else f'a step that failed with {error!r} when it was repeated'
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else 'the computation of the loss, after the last layer'


def _unwrapped(model: nn.Module) -> Any:
    return model.module if is_model_wrapper(model) else model


def _all_finite(values: Any) -> bool:
    tensors = (leaf for leaf in _leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def _image_names(batch: Any) -> Iterator[str]:
    """Yields the image names from the data samples of a batch."""
    for leaf in _leaves(batch):
        if hasattr(leaf, 'metainfo'):
            names = leaf.metainfo
            yield str(names.get('img_path', f'image {names.get("img_id", names.get("sample_idx", "?"))}'))


def _leaves(value: Any) -> Iterator[Any]:
    """Yields the values in nested dicts, lists and tuples."""
    if isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _leaves(part)
    else:
        yield value
