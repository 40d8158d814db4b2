"""Hook that requires heads, training data and evaluation data to have the same classes."""

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
    """Hook that stops a run if its labels would stand for the wrong classes.

    If a head has no class for a label, some detectors treat the label as background, and others crash. If the class
    folders of the training and validation data differ, the same label stands for different classes.

    MMDetection's ``NumClassCheckHook`` must be added to each config. It rejects heads with too many classes and does
    not compare the datasets.
    """

    def before_train(self, runner: Runner) -> None:
        train = classes_of(runner.train_dataloader)
        check_heads(runner, train, 'training')
        other = classes_of(runner.val_dataloader) if runner.val_loop is not None else ()
        for label, (one, two) in enumerate(zip(train, other, strict=False)):
            if one != two:
                raise UserError(f'label {label} is {one!r} in the training data, but {two!r} in the validation data.')
        if train and len(other) > len(train):
            raise UserError(f'the validation data has {len(other)} classes, but the training data only {len(train)}.')

    def before_test(self, runner: Runner) -> None:
        check_heads(runner, classes_of(runner.test_dataloader), 'test')


def classes_of(loader: Any) -> tuple[str, ...]:
    """Returns the class names in the metainfo of a dataset, or an empty tuple.

    For panoptic datasets, returns only the classes that have boxes.
    """
    metainfo = getattr(loader.dataset, 'metainfo', None) or {}
    return tuple(metainfo.get('thing_classes') or metainfo.get('classes') or ())


def check_heads(runner: Runner, classes: tuple[str, ...], which: str) -> None:
    for name, number in heads(runner.model):
        if number < len(classes):
            raise UserError(f'{name} has num_classes={number}, but the {which} data has {len(classes)} classes.')
        if classes and number > len(classes):
            runner.logger.warning(f'{name} has num_classes={number}, more than the {len(classes)} of the {which} data.')


def heads(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yields the name and number of classes of each head that predicts classes.

    RPNs and class-agnostic mask heads are skipped.
    """
    for name, module in model.named_modules():
        number = getattr(module, 'num_classes', None)
        alike = getattr(module, 'class_agnostic', False) or 'RPN' in type(module).__name__
        if HEAD.fullmatch(name) and isinstance(number, int) and not alike:
            yield name, number
