"""Compares a backbone with the backbone config that was saved in a checkpoint."""

import ast
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from mmengine.registry import MODELS
from torch import nn

from mmdtn.norms import DTN, TokenNorm

from .arguments import settings_by_arguments

# Norm arguments that have no effect in evaluation. Fine-tuning may change these arguments.
OF_TRAINING = {'momentum', 'sync', 'warmup_iters', 'alpha_fwd', 'alpha_bwd', 'q', 'window', 'grad_window'}
OF_TRAINING |= {'outlier_filter'}


def backbone_settings(checkpoint: Any) -> dict[str, Any] | None:
    """Returns the settings of the backbone in a checkpoint.

    The settings come from the arguments of a training script, or from the config that MMEngine's runner saves in the
    checkpoint's ``meta``. If the checkpoint has neither, the result is None. The config is parsed as data and never
    executed. A config that is not plain data is ignored.
    """
    if told := settings_by_arguments(checkpoint):
        return told[1]
    meta = checkpoint.get('meta') if isinstance(checkpoint, dict) else None
    text = meta.get('cfg') if isinstance(meta, dict) else None
    if not isinstance(text, str):
        return None
    try:
        model = next(
            ast.literal_eval(_AsLiterals().visit(line.value))
            for line in ast.parse(text).body
            if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == 'model'
        )
    except (SyntaxError, ValueError, StopIteration):
        return None
    settings = model.get('backbone', model) if isinstance(model, dict) else None
    return settings if isinstance(settings, dict) else None


class _AsLiterals(ast.NodeTransformer):
    """Converts calls such as ``dict(a=1)`` to literals such as ``{'a': 1}``."""

    def visit_Call(self, node: ast.Call) -> ast.AST:  # ast.NodeTransformer requires this name
        self.generic_visit(node)
        if not isinstance(node.func, ast.Name) or node.func.id != 'dict' or node.args:
            raise ValueError('not plain data')
        keys: list[ast.expr | None] = [ast.Constant(keyword.arg) for keyword in node.keywords]
        return ast.Dict(keys, [keyword.value for keyword in node.keywords])


def check_origin(settings: Mapping[str, Any], backbone: nn.Module, resize: bool = False) -> bool:
    """Raises ValueError if a backbone with ``settings`` and the same weights computes different outputs.

    Returns whether a comparison was possible. Settings of another package's backbone cannot be compared. With
    ``resize``, computed position embeddings may have different sizes.
    """
    said = dict(settings)
    kind = said.pop('type', None)
    if MODELS.get(kind if isinstance(kind, str) else '') is not type(backbone):
        return False  # the backbone is from another package
    try:
        with torch.device('meta'):  # allocates no memory
            origin = type(backbone)(**said | dict(init_cfg=None))
    except TypeError:  # a different version of this package had different arguments
        return False
    differences = []
    before, after = (getattr(model, 'cls_from', None) for model in (origin, backbone))
    if None not in (before, after) and before != after:
        differences.append(f'cls_from={before}, not {after}')
    tables = [dict(model.named_buffers()).get('pos_embed') for model in (origin, backbone)]
    before, after = ('' if table is None else ' x '.join(map(str, table.shape[1:3])) for table in tables)
    if before and after and before != after and not resize:
        differences.append(f'positions are computed for {before} tokens, not {after}')
    theirs = dict(origin.named_modules())
    for name, module in backbone.named_modules():
        other = theirs.get(name)
        before, after = (getattr(m, 'num_heads', None) for m in (other, module))
        if name.endswith('attn') and None not in (before, after) and before != after:
            differences.append(f'{name} has {before} heads, not {after}')
        differences += _different_norms(name, other, module)
    if differences:
        raise ValueError(
            'With the same weights, the target would compute different outputs. The config of the file differs: '
            f'{"; ".join(differences[:3])}{f"; and {len(differences) - 3} more" if differences[3:] else ""}. The '
            f'backbone of the file is {dict(settings)}. Use these settings for the target.'
        )
    return True


def _different_norms(name: str, other: nn.Module | None, module: nn.Module) -> list[str]:
    """Lists the differences between a norm and the norm in the file. A replaced LayerNorm is not a difference."""
    differences = []
    norms = isinstance(module, (DTN, nn.LayerNorm)) and isinstance(other, (DTN, nn.LayerNorm))
    before, after = (getattr(m, 'eps', None) for m in (other, module))
    if norms and before != after:
        differences.append(f'{name} has eps={before}, not {after}')
    if isinstance(module, DTN) and isinstance(other, DTN) and _function_of(other) != _function_of(module):
        differences.append(f'{name} is {in_one_line(other)}, not {in_one_line(module)}')
    if isinstance(other, TokenNorm) and not isinstance(module, nn.Identity):  # fusing replaces norms with nn.Identity
        same = type(other) is type(module) and _in_evaluation(other) == _in_evaluation(module)
        differences += [] if same else [f'{name} is {in_one_line(other)}, not {in_one_line(module)}']
    return differences


def _function_of(norm: DTN) -> tuple:
    """Returns the DTN settings other than eps that the tensors do not determine.

    If each pooling cell is one token, ``pool_second_moment`` has no effect.
    """
    settings = norm.settings._replace(eps=0)
    if settings.pool_size == 1:
        settings = settings._replace(pool_second_moment=True)
    return settings, norm.mean_lambda, norm.var_lambda


def _in_evaluation(norm: nn.Module) -> dict[str, Any]:
    """Returns the arguments of a norm that take effect in evaluation."""
    names = inspect.signature(type(norm)).parameters.keys() - OF_TRAINING
    return {name: getattr(norm, name) for name in names}


def in_one_line(norm: nn.Module) -> str:
    """Returns the class name and the arguments of a norm."""
    return f'{type(norm).__name__}({norm.extra_repr()})'
