"""Heads, training and evaluation data have the same classes."""

import re
from collections.abc import Iterator
from typing import Any

from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import nn

from mmdtn.errors import UserError

HEAD = re.compile(r'(.*\.)?(head|bbox_head|mask_head)(\.\d+)?')


@HOOKS.register_module()
class CheckClassesHook(Hook):
    """Refuses a run in which labels cannot mean what they should.

    A label beyond a head's classes is background to some detectors and a crash to others; where class folders differ
    between training and evaluation, the same label is another class. (MMDetection's ``NumClassCheckHook`` has to be put
    into each config, refuses larger heads as well, and does not compare the data.)
    """

    def before_train(self, runner: Runner) -> None:
        train = classes_of(runner.train_dataloader)
        check_heads(runner, train, 'training')
        other = classes_of(runner.val_dataloader) if runner.val_loop is not None else ()
        for label, (one, two) in enumerate(zip(train, other, strict=False)):
            if one != two:
                raise UserError(f'label {label} is {one!r} in the training data, but {two!r} in that of validation.')
        if train and len(other) > len(train):
            raise UserError(f'the validation data has {len(other)} classes, the training data only {len(train)}.')

    def before_test(self, runner: Runner) -> None:
        check_heads(runner, classes_of(runner.test_dataloader), 'test')


def classes_of(loader: Any) -> tuple[str, ...]:
    """Of the data's metainfo, of panoptic data those that have boxes; none where it does not say."""
    metainfo = getattr(loader.dataset, 'metainfo', None) or {}
    return tuple(metainfo.get('thing_classes') or metainfo.get('classes') or ())


def check_heads(runner: Runner, classes: tuple[str, ...], which: str) -> None:
    for name, number in heads(runner.model):
        if number < len(classes):
            raise UserError(f'{name} has num_classes={number}, but the {which} data has {len(classes)} classes.')
        if classes and number > len(classes):
            runner.logger.warning(f'{name} has num_classes={number}, more than the {len(classes)} of the {which} data.')


def heads(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Name and classes of those that tell classes apart, as RPNs and masks for all classes do not."""
    for name, module in model.named_modules():
        number = getattr(module, 'num_classes', None)
        alike = getattr(module, 'class_agnostic', False) or 'RPN' in type(module).__name__
        if HEAD.fullmatch(name) and isinstance(number, int) and not alike:
            yield name, number
