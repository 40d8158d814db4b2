"""With which settings the model of a file computes, where its tensors do not tell."""

import ast
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from mmengine.registry import MODELS
from torch import nn

from mmdtn.norms import DTN, TokenNorm

from .arguments import settings_by_arguments

# Arguments of norms that change nothing in evaluation: a training may go on with others.
OF_TRAINING = {'momentum', 'sync', 'warmup_iters', 'alpha_fwd', 'alpha_bwd', 'q', 'window', 'grad_window'}
OF_TRAINING |= {'outlier_filter'}


def backbone_settings(checkpoint: Any) -> dict[str, Any] | None:
    """Of the config in a checkpoint's meta, as MM's training runs leave it there, or of a training script's arguments.

    None where there is neither. The text of a config is read as data: one that has to be run to be understood is none.
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
    """dict(a=1) as {'a': 1}."""

    def visit_Call(self, node: ast.Call) -> ast.AST:  # ast finds it by this name
        self.generic_visit(node)
        if not isinstance(node.func, ast.Name) or node.func.id != 'dict' or node.args:
            raise ValueError('no plain data')
        keys: list[ast.expr | None] = [ast.Constant(keyword.arg) for keyword in node.keywords]
        return ast.Dict(keys, [keyword.value for keyword in node.keywords])


def check_origin(settings: Mapping[str, Any], backbone: nn.Module, resize: bool = False) -> bool:
    """That ``backbone`` computes with the tensors of a file what the backbone of ``settings``, its own, did.

    Returns whether they could be compared: settings of another package's backbone cannot. With ``resize``, positions
    that both compute may be those of different image sizes.
    """
    said = dict(settings)
    kind = said.pop('type', None)
    if MODELS.get(kind if isinstance(kind, str) else '') is not type(backbone):
        return False  # of another package, whose format tells
    try:
        with torch.device('meta'):  # without memory
            origin = type(backbone)(**said | dict(init_cfg=None))
    except TypeError:  # an argument of another version
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
            f'with the same weights the target would compute something else. In the config of the file '
            f'{"; ".join(differences[:3])}{f"; and {len(differences) - 3} more" if differences[3:] else ""}. Its '
            f'settings are {dict(settings)}.'
        )
    return True


def _different_norms(name: str, other: nn.Module | None, module: nn.Module) -> list[str]:
    """What of a norm would be computed in another way. LayerNorm may become another norm, which is then trained."""
    differences = []
    norms = isinstance(module, (DTN, nn.LayerNorm)) and isinstance(other, (DTN, nn.LayerNorm))
    before, after = (getattr(m, 'eps', None) for m in (other, module))
    if norms and before != after:
        differences.append(f'{name} has eps={before}, not {after}')
    if isinstance(module, DTN) and isinstance(other, DTN) and _function_of(other) != _function_of(module):
        differences.append(f'{name} is {in_one_line(other)}, not {in_one_line(module)}')
    if isinstance(other, TokenNorm) and not isinstance(module, nn.Identity):  # Identity is what fusing leaves
        same = type(other) is type(module) and _in_evaluation(other) == _in_evaluation(module)
        differences += [] if same else [f'{name} is {in_one_line(other)}, not {in_one_line(module)}']
    return differences


def _function_of(norm: DTN) -> tuple:
    """What neither tensors nor eps tell. Cells of one token have no variance to pool."""
    settings = norm.settings._replace(eps=0)
    if settings.pool_size == 1:
        settings = settings._replace(pool_second_moment=True)
    return settings, norm.mean_lambda, norm.var_lambda


def _in_evaluation(norm: nn.Module) -> dict[str, Any]:
    """The arguments by which a norm computes in evaluation."""
    names = inspect.signature(type(norm)).parameters.keys() - OF_TRAINING
    return {name: getattr(norm, name) for name in names}


def in_one_line(norm: nn.Module) -> str:
    """The class and the unusual arguments of a norm, without its parts."""
    return f'{type(norm).__name__}({norm.extra_repr()})'
