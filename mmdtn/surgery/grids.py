"""Runs a model to find the token grid at the input of each LayerNorm.

:mod:`mmdtn.surgery.conversion` uses this module for models that were not written for this package.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mmdtn.errors import first_line
from mmdtn.norms.base import TORCHS_BATCH_AND_INSTANCE_NORMS

from .layouts import Layout, Size, fitting_layouts
from .order import Claim, Residual, Values, call_with, judge, residual, tensors

BATCH = 2  # number of images; windows in the batch dimension would make it larger
CHECKPOINTING = ('with_cp', 'grad_checkpointing', 'gradient_checkpointing')  # flags of MM, timm and Hugging Face

Call = Callable[[Any, Tensor], Any]  # calls a model with a batch of images
Shapes = dict[str, list[tuple[int, ...]]]  # input shape of each call, by the name of the norm


@dataclass
class Found:
    """Findings about one LayerNorm. ``why`` is the reason why the norm cannot be converted, or an empty string."""

    name: str
    parent: str  # name of the module that calls the norm
    grid: Size = (0, 0)  # token grid for the example size
    layout: Layout | None = None
    in_block: bool = False
    why: str = ''


@dataclass
class Survey:
    """Findings about all normalisation layers of a model."""

    norms: list[Found]
    others: dict[str, str]  # normalisation that is not a LayerNorm module
    sizes: list[Size] = field(default_factory=list)  # image sizes that the model accepted, with the example size first
    entrance: str = ''  # name of the first submodule that gets the images, or '' for the model itself


def survey(model: nn.Module, example: tuple[int, ...], call: Call, wanted: Callable[[Found], bool]) -> Survey:
    """Runs ``model`` with ``call`` on images of up to three sizes and returns the findings. The model stays unchanged.

    If ``wanted`` returns True for a norm, the function also tries to prove the order of its tokens. ``example`` is the
    first image size, as ``(height, width)`` for images with three channels or as ``(channels, height, width)``.
    """
    if not isinstance(example, tuple | list) or len(example) not in (2, 3):
        raise ValueError(f'example_size={example!r}: give (height, width), or (channels, height, width).')
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(
            f'{type(model).__name__} has parameters on the meta device, but the conversion has to run the model. Build '
            'it outside of torch.device("meta"), or call model.to_empty(device="cpu") and load weights first.'
        )
    channels, size = (3, example) if len(example) == 2 else (example[0], example[1:])
    size = (size[0], size[1])
    called = _Called(model, call)
    images = partial(_images, model, channels)
    norms = layer_norms(model)
    with _in_mode(model, training=False):
        watched = _Watch(called, norms)
        try:
            runs = {size: watched.run(images(size), closely=True, values=_telling(norms))}
        except Exception as error:
            raise ValueError(_cannot_run(model, error, (BATCH, channels, *size))) from error
        watched.find_blocks()
        runs |= _of_other_sizes(watched, images, size)
    with _in_mode(model, training=True):
        of_training = watched.run_in_training(images(size))
    found: list[Found] = []
    claims: list[Claim] = []
    for name in norms:
        this, layouts = _look_at(name, watched, runs, of_training)
        found.append(this)
        if wanted(this):
            claims.extend(Claim(name, layout, *watched.shares.get(name, ())) for layout in layouts)
    with _in_mode(model, training=False):
        wrong: dict[Claim, str] = {}
        for of_proof in [*runs][:2]:
            right = [claim for claim in claims if not wrong.get(claim)]
            wrong |= judge(right, model, called.with_values, watched.blocks, images(of_proof)[0])
    for this in found:
        claimed = {claim.layout: wrong[claim] for claim in claims if claim.norm == this.name}
        this.layout = next((layout for layout, why in claimed.items() if not why), None)
        if this.layout is not None:
            this.grid = this.layout.grid(size)
        else:
            this.why = this.why or next(iter(claimed.values()), '')
    return Survey(found, watched.others, [*runs], watched.entrance or '')


def layer_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules that may be a LayerNorm, by name.

    Some packages have their own LayerNorm classes, which have the attributes of torch's class. Only a run shows whether
    such a module computes LayerNorm.
    """
    own = ('normalized_shape', 'weight', 'bias', 'eps')
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.LayerNorm) or all(hasattr(module, attribute) for attribute in own)
    }


def _telling(norms: dict[str, nn.Module]) -> Values:
    """Returns random weights for the norms.

    With initial weights, a norm that follows another norm would leave its input unchanged. A run could then not show
    what the norm computes.
    """
    generator = torch.Generator().manual_seed(0)
    parameters = ((f'{name}.{of}', p) for name, norm in norms.items() for of, p in norm.named_parameters(recurse=False))
    return {name: (0.5 + torch.rand(p.shape, generator=generator)).to(p) for name, p in parameters}


class _Called(nn.Module):
    """Wraps a model so that it takes images as its only input and can run with replaced parameters."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, images: Tensor) -> Any:
        return self.call(self.model, images)

    def with_values(self, values: Values, images: Tensor) -> Any:
        return call_with(self, {f'model.{name}': value for name, value in values.items()}, (images,), {})


@contextmanager
def _in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Sets the training mode of all modules and turns off gradients and activation checkpointing.

    Some models use activation checkpointing even in evaluation mode and then compute blocks twice.
    """
    before = [
        (module, name, getattr(module, name))
        for module in model.modules()
        for name in ('training', *CHECKPOINTING)
        if isinstance(getattr(module, name, None), bool)
    ]
    for module, name, _ in before:
        setattr(module, name, training and name == 'training')
    try:
        with torch.no_grad():
            yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)  # train() would not restore the mode of frozen stages


def _images(model: nn.Module, channels: int, size: Size) -> Tensor:
    like = next(model.parameters())
    numbers = torch.randn(BATCH, channels, *size, generator=torch.Generator().manual_seed(0))
    return numbers.to(like.device, like.dtype)


def _cannot_run(model: nn.Module, error: Exception, shape: tuple[int, ...]) -> str:
    name = type(model).__name__
    modules = [*model.modules()]
    if any(isinstance(m, nn.Embedding) for m in modules) and not any(isinstance(m, nn.Conv2d) for m in modules):
        return (
            f'{name} is not an image model: it has an nn.Embedding and no convolution, as text models do. '
            'convert_norms takes models of images.'
        )
    return (
        f'{name} cannot be run on images of {_shape(shape)}: {type(error).__name__}: '
        f'{first_line(error).rstrip(".")}. Give example_size=(height, width) or (channels, height, width) of images '
        'that the model takes, or call=lambda model, images: ... if the model takes more than images.'
    )


def _of_other_sizes(watched: '_Watch', images: Callable[[Size], Tensor], size: Size) -> dict[Size, Shapes]:
    """Runs the model on images of two more sizes and returns the input shapes of the norms by size.

    Returns an empty dict if the model accepts only the example size.
    """
    height, width = size
    h, w = (max(64, side // 64 * 64) for side in size)
    h32, w32 = (max(64, side // 32 * 32) for side in size)
    for pair in (
        # For strides up to 64, sides next to multiples of 64 show whether a layer rounds up or down.
        ((h + 1, w + 63), (h + 63, w + 65)),
        ((h32 + 32, w32 + 96), (h32 + 64, w32 + 32)),
        ((height, 2 * width), (2 * height, width)),  # windows that fit the example grid also fit these
    ):
        try:
            return {another: watched.run(images(another)) for another in pair}
        except Exception:  # models raise many kinds of errors for sizes that they do not support
            continue
    return {}


class _Watch(TorchFunctionMode):
    """Records the inputs of the norms while a model runs."""

    def __init__(self, called: _Called, norms: dict[str, nn.Module]) -> None:
        super().__init__()
        self.called, self.norms = called, norms
        self.form: dict[str, str] = {}  # form of each norm's input
        self.modules = modules = dict(called.model.named_modules())
        self.others = {
            name: type(module).__name__
            for name, module in modules.items()
            if 'norm' in type(module).__name__.lower() and name not in norms
            if isinstance(module, TORCHS_BATCH_AND_INSTANCE_NORMS) or not any(module.children())
        }
        self.callers = {name: _callers(name, modules) for name in norms}
        self.blocks: dict[str, Residual] = {}
        self.in_block: set[str] = set()  # names of norms in residual blocks
        self.shares: dict[str, tuple[str, int]] = {}  # block with the same tokens as the norm, and index of its input
        self.entrance: str | None = None
        self._calls: dict[str, tuple[tuple, dict]] = {}  # arguments of the first call of each possible block
        self._inside: list[str] = []  # modules in the current call stack, the outermost first
        self._entrance_open = True

    def run(self, images: Tensor, closely: bool = False, values: Values | None = None) -> Shapes:
        shapes: Shapes = {}
        with ExitStack() as stack:
            for name, norm in self.norms.items():
                note = partial(self._note, shapes, name, closely)
                stack.enter_context(norm.register_forward_hook(note, with_kwargs=True))
            if closely:
                for name, module in self.modules.items():
                    enter = partial(self._enter, name, images)
                    stack.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
                    stack.enter_context(module.register_forward_hook(self._leave))
                stack.enter_context(self)
            elif self.entrance:
                check = partial(self._check_entrance, images.shape)
                stack.enter_context(self.modules[self.entrance].register_forward_pre_hook(check, with_kwargs=True))
            self.called.with_values(values or {}, images)
        return shapes

    def run_in_training(self, images: Tensor) -> Shapes:
        """Runs the model in training mode and leaves its buffers and the random number state unchanged.

        Returns an empty dict if the model needs more than images in training mode.
        """
        buffers = {name: buffer.clone() for name, buffer in self.called.model.named_buffers()}
        try:
            with torch.random.fork_rng(devices=[images.device] if images.is_cuda else []):
                return self.run(images, values=buffers)
        except Exception:
            return {}

    def find_blocks(self) -> None:
        """Finds the residual blocks that contain norms.

        A norm belongs to a block if the block itself calls the norm. A norm that a module inside the block calls must
        read the block's tokens or add its output to them.
        """
        seen: dict[str, Residual | None] = {}
        for name, callers in self.callers.items():
            for caller in callers:
                if caller not in seen and caller in self._calls:
                    inside = {
                        n: (norm, self.form.get(n, '')) for n, norm in self.norms.items() if caller in self.callers[n]
                    }
                    seen[caller] = residual(self.modules[caller], *self._calls[caller], inside)
                if block := seen.get(caller):
                    if name in block.shared:
                        self.shares[name] = caller, block.shared[name]
                    if caller == callers[0] or name in block.shared:
                        self.in_block.add(name)
                    break
        self.blocks = {name: block for name, block in seen.items() if block is not None}
        self._calls.clear()

    def _note(self, shapes: Shapes, name: str, closely: bool, norm: Any, args: Any, kwargs: Any, y: Any) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        shapes.setdefault(name, []).append(tuple(x.shape))
        if closely:
            self.form[name] = _form(norm, x, y)

    def _enter(self, name: str, images: Tensor, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inside.append(name)
        if any(name in callers for callers in self.callers.values()):
            self._calls.setdefault(name, (args, kwargs))
        if (
            self._entrance_open
            and name
            and any(x.shape == images.shape and torch.equal(x, images) for x in tensors((args, kwargs)))
        ):
            self.entrance = name

    def _leave(self, module: nn.Module, args: Any, y: Any) -> None:
        if self._inside.pop() == self.entrance:
            self._entrance_open = False

    def _check_entrance(self, shape: torch.Size, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not any(x.shape == shape for x in tensors((args, kwargs))):
            self.entrance = ''

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.layer_norm and self._inside and self._inside[-1] not in self.norms:
            self.others[self._inside[-1]] = 'F.layer_norm, called by the module itself'
        return function(*args, **(kwargs or {}))


def _callers(name: str, modules: dict[str, nn.Module]) -> list[str]:
    """Returns the modules around a module that may call it, the innermost first.

    Containers such as ``nn.ModuleList`` and ``nn.Sequential`` are left out.
    """
    found = []
    while name:
        name = name.rpartition('.')[0]
        if name and not isinstance(modules[name], (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            found.append(name)
    return found


def _form(norm: Any, x: Tensor, y: Tensor) -> str:
    """Returns the form of the tokens that a module normalises like LayerNorm, or '' if it computes something else.

    The function compares the output with LayerNorm, because a class name does not tell what the class computes.
    """
    if not isinstance(y, Tensor) or y.shape != x.shape or len(norm.normalized_shape) != 1:
        return ''
    (C,) = norm.normalized_shape

    def normalised(x: Tensor) -> Tensor:
        return F.layer_norm(x, (C,), norm.weight, norm.bias, norm.eps)

    close = partial(torch.allclose, rtol=0, atol=1e-4 if x.dtype == torch.float32 else 1e-1)
    if x.shape[-1] == C and close(y, normalised(x)):
        return {3: 'B x T x C', 4: 'B x H x W x C'}.get(x.dim(), '')
    if x.dim() == 4 and x.shape[1] == C:
        last = normalised(x.permute(0, 2, 3, 1))
        return 'B x C x H x W' if close(y, last.permute(0, 3, 1, 2)) else ''
    return ''


def _look_at(name: str, watched: _Watch, runs: dict[Size, Shapes], of_training: Shapes) -> tuple[Found, list[Layout]]:
    """Returns the findings about one norm, and the layouts that explain its shapes, starting with the most likely."""
    found = Found(name, next(iter(watched.callers[name]), ''), in_block=name in watched.in_block)
    calls = [shapes.get(name, []) for shapes in runs.values()]
    if not all(calls):
        found.why = 'is not called'
        return found, []
    shapes = [some[0] for some in calls]
    given = _shape(shapes[0])
    in_training = of_training.get(name, shapes[:1])[0]
    if any(len(set(some)) > 1 for some in calls):
        several = ' and '.join(map(_shape, sorted(set(calls[0]))))
        found.why = f'gets inputs of several shapes in one run: {several}'
    elif any(shape[0] != BATCH for shape in shapes):
        found.why = f'gets windows or other groups of tokens in the batch dimension: {given} for {BATCH} images'
    elif in_training != shapes[0]:
        found.why = f'gets other tokens in training, as in models that drop tokens: {_shape(in_training)}, not {given}'
    elif len(shapes[0]) not in (3, 4):
        found.why = f'gets no tokens on a grid: its input is {given}'
    elif not (form := watched.form[name]):
        found.why = f'does not compute LayerNorm over the channels: its input is {given}'
    elif not (layouts := fitting_layouts(form, tuple(shapes), tuple(runs))):
        found.why = f'gets tokens that match no grid of the image: its input is {given}'
    else:
        return found, layouts
    return found, []


def _shape(shape: Sequence[int]) -> str:
    return ' x '.join(map(str, shape))
