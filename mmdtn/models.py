"""Reads configs, builds their models, and loads checkpoints.

The rest of the package uses these functions for all such work.
"""

import copy
import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from traceback import extract_tb
from typing import Any

from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import Runner

from mmdtn import checkpoints
from mmdtn.backbones.base import Backbone
from mmdtn.errors import UserError, first_line, nearest


@dataclass
class TrainedModel:
    """A model in evaluation mode with a checkpoint's weights, and its config."""

    label: str
    config: str
    checkpoint: str
    cfg: Config
    model: Any  # a backbone or a BaseModel of mmengine
    classes: tuple[str, ...]

    def class_name(self, label: int) -> str:
        return self.classes[label] if label < len(self.classes) else str(label)


def read_config(path: str | Path, changes: Mapping[str, Any] | None = None) -> Config:
    """Reads a config and sets its default scope.

    MMEngine imports the modules in ``custom_imports``. Errors name the file and, if known, the line.

    Args:
        path: The config file.
        changes: Settings to override, with keys such as ``'model.backbone.depth'``.
    """
    try:
        cfg = Config.fromfile(path)
    except (OSError, ModuleNotFoundError):  # these errors name the file or the module themselves
        raise
    except SyntaxError as error:  # the error may be in a base file, so the message quotes the line
        raise UserError(f'{path}: line {error.lineno}, {(error.text or "").strip()!r}: {error.msg}') from error
    except Exception as error:
        raise UserError(f'{_place(error) or path}: {first_line(error)}') from error
    if changes:
        known = {*cfg, *inspect.signature(Runner.__init__).parameters, 'runner_type', 'custom_imports', 'auto_scale_lr'}
        for key in changes:
            name = key.partition('.')[0]
            if name not in known and (close := nearest(name, known)):
                raise UserError(f'--cfg-options {key}: {path} has no {name!r}{close}')
        cfg.merge_from_dict(dict(changes))
    enter_scope(cfg)
    return cfg


def _place(error: Exception) -> str | None:
    """Returns the config file and the line where an error occurred.

    MMEngine runs configs as modules. Unlike OpenMMLab's mmengine, the one of onedl compiles configs with their file
    name.
    """
    run = (frame for frame in reversed(extract_tb(error.__traceback__)) if frame.name == '<module>')
    return next((f'{frame.filename}, line {frame.lineno}' for frame in run if os.path.exists(frame.filename)), None)


def enter_scope(cfg: Config) -> None:
    """Sets the default scope, so that names without a scope refer to classes from the config's package."""
    init_default_scope(cfg.get('default_scope', 'mmengine'))


def build(cfg: Config, **changes: Any) -> Any:
    """Builds a config's model in evaluation mode, without loading pretrained weights.

    Args:
        cfg: The config.
        changes: Settings of the model to override.
    """
    enter_scope(cfg)
    if 'model' not in cfg:
        raise UserError(f'{cfg.filename} has no model.')
    settings = copy.deepcopy(dict(cfg.model, **changes))
    if cfg.get('data_preprocessor'):  # mmengine's Runner does the same
        settings.setdefault('data_preprocessor', cfg.data_preprocessor)
    model = MODELS.build(settings)
    model.eval()  # eval() of some MM models returns None
    return model


def build_backbone(cfg: Config) -> Any:
    """Builds the backbone of a config's model in evaluation mode, without loading pretrained weights."""
    enter_scope(cfg)
    backbone = MODELS.build(copy.deepcopy(cfg.model.backbone))
    backbone.eval()
    return backbone


def load(config: str, checkpoint: str) -> TrainedModel:
    """Builds a config's model and loads a checkpoint, whose keys must match the model's keys exactly."""
    cfg = read_config(config)
    model = build(cfg)
    content = checkpoints.load(checkpoint)
    state = checkpoints.state_of(content, checkpoint)
    if isinstance(model, Backbone) and any(key.startswith('backbone.') for key in state):
        state = {k.removeprefix('backbone.'): v for k, v in state.items() if k.startswith('backbone.')}
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        raise UserError(f'{checkpoint} does not fit {config}: {" ".join(lines[1:3])[:400]}') from None
    meta = content.get('meta', {}) if isinstance(content, dict) else {}
    classes = (meta.get('dataset_meta') or {}).get('classes') or ()
    return TrainedModel(Path(config).stem, config, checkpoint, cfg, model, tuple(classes))
