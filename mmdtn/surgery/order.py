"""Proves that tokens lie row by row, by changing parts of an image and looking at which tokens change.

There are two images, and mixtures of them. Each mixture takes a pixel from the second image where one bit of the number
of its row of patches, or of its column, is set. So the mixtures tell bit by bit which patch each token comes from.
The numbers are in Gray code, in which neighbours differ in one bit: a token that lies between two patches is unclear in
that bit alone. Meanwhile residual blocks hand on what they are given, as attention would mix the tokens.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from mmdtn.norms.base import TORCHS_BATCH_AND_INSTANCE_NORMS

from .layouts import Layout, Size, by

SEEDS = 3  # of random weights, for norms that are given what their block has computed
CLEAR = 0.5  # a token is at least three times as far from one image as from the other
SILENT = 1e-6  # of the largest change: the token does not come from the image
MOST = 0.9  # of the tokens, which show that the weights mixed little
CENTRE = 50  # how much larger the centre of a convolution's kernel is than the rest of it
MISPLACED = 'has tokens in another order than row by row'
UNPROVED = 'has tokens whose order cannot be proved'

Values = dict[str, Tensor]  # parameters and buffers by name


class Residual(NamedTuple):
    """What makes a residual block an identity: values of its parameters. And which of its inputs each output equals."""

    values: Values
    sources: list[int]


class Claim(NamedTuple):
    """A layout that the tokens of a norm may have.

    They are looked at where the norm takes them, or where a block around it does if they are known to be the same.
    """

    norm: str
    layout: Layout
    block: str = ''
    source: int = 0  # which of the block's inputs


class Verdict(NamedTuple):
    """What is wrong with a claim, and nothing if it is proved; ``clear`` if each token has shown its place."""

    wrong: str
    clear: bool = True


class Bit(NamedTuple):
    """A bit of the number of a pixel's row (0) or column (1)."""

    axis: int
    number: int


class Response(NamedTuple):
    """Squared distances of each token: of a mixture from the first image and from the second, ``bits x h x w``."""

    from_first: Tensor
    from_second: Tensor
    of_both: Tensor  # of the two images from each other: h x w


def residual(module: nn.Module, args: tuple, kwargs: dict) -> Residual | None:
    """Says whether a module is a residual block: with suitable parameters it returns what it was given."""
    inputs = given(args, kwargs)
    for values in ({name: torch.zeros_like(p) for name, p in module.named_parameters()}, _handing_on(module)):
        try:
            outputs = tensors(call_with(module, values, *_copies((args, kwargs))))
        except Exception:  # of a module that divides by a parameter, say
            continue
        sources = [[i for i, x in enumerate(inputs) if _alike(x, y)] for y in outputs]
        if sources and all(sources):
            return Residual(values, [some[0] for some in sources])
    return None


def _alike(x: Tensor, y: Tensor, tolerance: float = 1e-6) -> bool:
    return x.shape == y.shape and torch.allclose(x, y, rtol=1e-5, atol=tolerance)


def _handing_on(module: nn.Module) -> Values:
    """Scales, batch norms and depthwise convolutions as identities, and zeros elsewhere."""
    values = {}
    for path, part in module.named_modules():
        batch_norm = isinstance(part, TORCHS_BATCH_AND_INSTANCE_NORMS)
        for name, p in part.named_parameters(recurse=False):
            value = torch.zeros_like(p)
            if p.dim() == 1 and name != 'bias' and (batch_norm or 'norm' not in type(part).__name__.lower()):
                value.fill_(1)
            elif isinstance(part, nn.Conv2d) and part.groups == p.shape[0] and p.dim() == 4:
                value[:, :, p.shape[2] // 2, p.shape[3] // 2] = 1
            values[f'{path}.{name}'.lstrip('.')] = value
        if batch_norm:
            values |= {f'{path}.{name}'.lstrip('.'): value for name, value in _no_statistics(part).items()}
    return values


def _no_statistics(norm: Any) -> Values:
    """With which a batch norm does nothing."""
    if norm.running_mean is None:
        return {}
    return dict(
        running_mean=torch.zeros_like(norm.running_mean), running_var=torch.full_like(norm.running_var, 1 - norm.eps)
    )


def same_tokens(
    module: nn.Module, block: Residual, args: tuple, kwargs: dict, norm: Any, form: str
) -> tuple[bool, int | None]:
    """Says whether a norm is given the tokens of the residual block around it, and which input it adds its tokens to.

    The latter is so behind attention, in front of a residual sum: numbers that the norm adds to the tokens that it
    returns arrive at the same tokens of what the block returns.
    """
    (channels,) = norm.normalized_shape
    flat = partial(channels_last, channels=channels, form=form)
    taken: list[Tensor] = []
    numbers: list[Tensor] = []

    def number(_: nn.Module, args: tuple, kwargs: dict, y: Tensor) -> Tensor:
        taken.append(flat(given(args, kwargs)[0]))
        numbers.append(torch.arange(1, flat(y).shape[1] + 1).to(y)[:, None].expand_as(flat(y)))
        if form == 'B x C x H x W':
            return y + numbers[-1].mT.unflatten(2, y.shape[2:])
        return y + numbers[-1].reshape(y.shape)

    outputs = tensors(call_with(module, block.values, *_copies((args, kwargs))))
    with norm.register_forward_hook(number, with_kwargs=True):
        numbered = tensors(call_with(module, block.values, *_copies((args, kwargs))))
    if len(taken) != 1:
        return False, None
    moved = [flat(a - b) for a, b in zip(numbered, outputs, strict=True)]
    adds_to = (source for source, some in zip(block.sources, moved, strict=True) if _alike(some, numbers[0], 1e-2))
    return any(_alike(taken[0], flat(x)) for x in given(args, kwargs)), next(adds_to, None)


def given(args: tuple, kwargs: dict) -> list[Tensor]:
    return tensors(args) or tensors(kwargs)


def channels_last(x: Tensor, channels: int, form: str) -> Tensor:
    """``B x T x C`` of tokens in the ``form`` of a norm, or in another one."""
    if x.dim() == 4 and x.shape[1] == channels and (form == 'B x C x H x W' or x.shape[-1] != channels):
        x = x.permute(0, 2, 3, 1)
    return x.flatten(1, -2) if x.dim() > 3 else x


def call_with(module: nn.Module, values: Values, args: tuple, kwargs: dict) -> Any:
    # With tied weights torch 2.12 leaves the new tensors in a module that has two names, as CoaT's convolutions have.
    return torch.func.functional_call(module, values, args, kwargs, tie_weights=False)


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _copies(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)


def judge(
    claims: list[Claim],
    model: nn.Module,
    run: Callable[[Values, Tensor], Any],
    blocks: dict[str, Residual],
    image: Tensor,
) -> dict[Claim, str]:
    """Says what is wrong with each claim. Nothing is, where every token was proved to lie as claimed.

    ``run`` calls ``model`` with other values on a batch of images of the size of ``image``, and ``blocks`` are its
    residual blocks. Norms that are given what their block is given are judged while all blocks are identities. Then
    each token comes from its own patch alone, and all norms of the same tokens get the same verdict. Where a block
    computes something first, it does so with weights that mix little, and identities replace what the blocks return.
    """
    size = (image.shape[1], image.shape[2])
    zeroed = {f'{name}.{key}': value for name, block in blocks.items() for key, value in block.values.items()}
    verdicts: dict[Claim, Verdict] = {}
    for alike in _of_one_unit(claims):
        bits, mixtures = _mixtures(alike, image)
        values = _nearsighted(model, 0, without=zeroed) | zeroed
        responses = _responses(alike, model, partial(run, values, mixtures), size)
        verdicts |= {claim: _verdict(claim.layout, responses[claim], bits, size) for claim in alike}
        proved = {claim.norm for claim, verdict in verdicts.items() if not verdict.wrong}
        unclear = [c for c in alike if c.norm not in proved and not c.block and not verdicts[c].clear]
        sums: dict[Claim, list[Response]] = {}
        for seed in range(1, SEEDS + 1):
            if not unclear:
                break
            with _identities(model, blocks):
                responses = _responses(unclear, model, partial(run, _nearsighted(model, seed), mixtures), size)
            for claim in unclear:
                sums[claim] = [_sum(*both) for both in zip_longest(sums.get(claim, []), responses[claim])]
                verdicts[claim] = _verdict(claim.layout, sums[claim], bits, size)
            unclear = [claim for claim in unclear if verdicts[claim].wrong]
    return {claim: verdict.wrong for claim, verdict in verdicts.items()}


def _of_one_unit(claims: list[Claim]) -> list[list[Claim]]:
    """Those together whose strides differ by powers of two: their patches have bits in common."""
    found = defaultdict(list)
    for claim in claims:
        found[tuple(_unit(axis.stride) for axis in (claim.layout.rows, claim.layout.columns))].append(claim)
    return list(found.values())


def _unit(stride: int) -> int:
    return stride // (stride & -stride)


def _mixtures(claims: list[Claim], image: Tensor) -> tuple[list[Bit], Tensor]:
    """The bits that tell apart the patches of all claims, and the images: the two, and a mixture for each bit."""
    first, second = image.sign(), -image.sign()  # which differ by as much in each pixel
    bits, mixtures = [], [first, second]
    for axis in (0, 1):
        strides = [(claim.layout.rows, claim.layout.columns)[axis].stride for claim in claims]
        side = image.shape[1 + axis]
        numbers = torch.arange(side, device=first.device) // _unit(strides[0])
        lowest = min(map(_power, strides))
        for number in range(lowest, int(numbers[-1]).bit_length()):
            chosen = _bit(numbers, number)
            mixtures.append(torch.where(chosen[:, None] if axis == 0 else chosen, second, first))
            bits.append(Bit(axis, number))
    return bits, torch.stack(mixtures)


def _bit(numbers: Tensor, number: int) -> Tensor:
    """A bit of numbers in Gray code. The code of ``n // 2 ** k`` has the bits of the code of ``n`` from the k-th on."""
    return ((numbers ^ (numbers >> 1)) >> number) & 1 == 1


def _responses(
    claims: list[Claim], model: nn.Module, run: Callable[[], Any], size: Size
) -> dict[Claim, list[Response]]:
    """Of each call of the claims' norms."""
    found: dict[Claim, list[Response]] = {claim: [] for claim in claims}

    def note(claim: Claim, channels: int, module: nn.Module, args: tuple, kwargs: dict) -> None:
        flat = channels_last(given(args, kwargs)[claim.source], channels, claim.layout.form).float()
        tokens = flat[:, claim.layout.prefix :].unflatten(1, claim.layout.grid(size))
        first, second, *mixtures = tokens.unbind()
        from_first, from_second = (
            torch.stack([(mixture - image).square().sum(-1) for mixture in mixtures]) for image in (first, second)
        )
        found[claim].append(Response(from_first, from_second, (first - second).square().sum(-1)))

    with ExitStack() as stack:
        for claim in claims:
            (channels,) = model.get_submodule(claim.norm).normalized_shape  # type: ignore[misc, union-attr]
            module = model.get_submodule(claim.block or claim.norm)
            stack.enter_context(module.register_forward_pre_hook(partial(note, claim, channels), with_kwargs=True))
        run()
    return found


def _sum(one: Response | None, other: Response) -> Response:
    return other if one is None else Response(*(a + b for a, b in zip(one, other, strict=True)))


def _verdict(layout: Layout, calls: list[Response], bits: list[Bit], size: Size) -> Verdict:
    """That of the first call in which something is wrong."""
    if not calls:
        return Verdict(f'{UNPROVED}: it was not called with other weights', clear=False)
    verdicts = (_verdict_of_call(layout, response, bits, size) for response in calls)
    return next((verdict for verdict in verdicts if verdict.wrong), Verdict(''))


def _verdict_of_call(layout: Layout, response: Response, bits: list[Bit], size: Size) -> Verdict:
    if not response.of_both.any():
        return Verdict(f'{UNPROVED}: they do not change with the image', clear=False)
    grid = layout.grid(size)
    shown = ((response.from_first - response.from_second) / (response.from_first + response.from_second)).nan_to_num(0)
    bad = response.of_both <= SILENT * response.of_both.max()
    misplaced = torch.zeros_like(bad)
    unclear, code = (torch.zeros(2, *grid, dtype=torch.long, device=bad.device) for _ in range(2))  # of rows, columns
    for bit, towards_second in zip(bits, shown, strict=True):
        stride = (layout.rows, layout.columns)[bit.axis].stride
        if (number := bit.number - _power(stride)) < 0:
            continue  # it differs inside a patch
        patches = torch.arange(-1, grid[bit.axis] + 1, device=bad.device).clamp(0, (size[bit.axis] - 1) // stride)
        is_set = _bit(patches, number).unsqueeze(1 - bit.axis if bit.axis else 1)
        own = is_set.narrow(bit.axis, 1, grid[bit.axis])
        before, behind = (is_set.narrow(bit.axis, start, grid[bit.axis]) for start in (0, 2))
        agreement = torch.where(own, towards_second, -towards_second)
        misplaced |= agreement < -CLEAR
        bad |= (agreement <= CLEAR) & (before == own) & (behind == own)
        unclear[bit.axis] += towards_second.abs() <= CLEAR
        code[bit.axis] += (towards_second > 0).long() << number
    bad |= misplaced
    if not bad.any():
        return Verdict('')
    clear = (unclear <= 1).all(0)  # a token between two patches is unclear in one bit
    shows = misplaced & clear
    row, column = divmod(int((shows if shows.any() else bad).flatten().long().argmax()), grid[1])
    if not shows.any() or clear.float().mean() < MOST:
        why = 'changes with several parts of the image' if response.of_both[row, column] else 'does not change with it'
        return Verdict(f'{UNPROVED}: of {by(grid)}, the one at {(row, column)} {why}', clear=False)
    source = tuple(_from_gray(int(numbers[row, column])) for numbers in code)
    return Verdict(f"{MISPLACED}: of {by(grid)}, the one at {(row, column)} is the image's at {source}")


def _from_gray(code: int) -> int:
    number = 0
    while code:
        number ^= code
        code >>= 1
    return number


def _power(stride: int) -> int:
    return (stride & -stride).bit_length() - 1


def _nearsighted(model: nn.Module, seed: int, without: Collection[str] = ()) -> Values:
    """Random weights that leave a token close to its place, as trained ones need not: order is a matter of the code.

    Kernels of convolutions have large centres.
    """
    generator = torch.Generator().manual_seed(seed)

    @cache
    def weight(shape: torch.Size) -> Tensor:
        w = torch.randn(shape, generator=generator) * (2 / shape[1:].numel() ** 0.5)
        if len(shape) == 4 and shape[2] % 2 == shape[3] % 2 == 1 < shape[2] * shape[3]:
            off_centre = torch.ones(shape[2:], dtype=torch.bool)
            off_centre[shape[2] // 2, shape[3] // 2] = False
            w[:, :, off_centre] /= CENTRE
        return w

    values = {}
    for name, p in model.named_parameters():
        if name in without:
            continue
        if sum(side > 1 for side in p.shape) > 1:
            values[name] = weight(p.shape).to(p)
        elif name.endswith('bias'):
            values[name] = torch.zeros_like(p)
        elif p.dim() == 1 and name.endswith('weight'):
            values[name] = torch.ones_like(p)
    for path, module in model.named_modules():
        if isinstance(module, TORCHS_BATCH_AND_INSTANCE_NORMS):
            values |= {f'{path}.{name}'.lstrip('.'): value for name, value in _no_statistics(module).items()}
    return values


@contextmanager
def _identities(model: nn.Module, blocks: dict[str, Residual]) -> Iterator[None]:
    """Makes the blocks return what they are given, after they have computed what they compute."""
    before = []

    def hand_on(forward: Callable[..., Any], sources: list[int], *args: Any, **kwargs: Any) -> Any:
        inputs = given(args, kwargs)
        copied_args, copied_kwargs = _copies((args, kwargs))
        leaves, structure = tree_flatten(forward(*copied_args, **copied_kwargs))
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for i, source in zip(at, sources, strict=True):
            leaves[i] = inputs[source]
        return tree_unflatten(leaves, structure)

    for name, block in blocks.items():
        module = model.get_submodule(name)
        before.append((module, vars(module).get('forward')))
        module.forward = partial(hand_on, module.forward, block.sources)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module, own in before:
            if own is None:
                del module.forward
            else:
                module.forward = own
