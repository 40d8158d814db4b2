"""Reads configs, builds their models and loads checkpoints into them: the only place of the package that does."""

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
    """A config, and its model with the weights of a checkpoint, in evaluation mode."""

    label: str
    config: str
    checkpoint: str
    cfg: Config
    model: Any  # a bare backbone, or mmengine's BaseModel
    classes: tuple[str, ...]

    def class_name(self, label: int) -> str:
        return self.classes[label] if label < len(self.classes) else str(label)


def read_config(path: str | Path, changes: Mapping[str, Any] | None = None) -> Config:
    """Reads a config, with ``changes`` as ``--cfg-options`` has them, and enters its scope.

    mmengine imports the config's ``custom_imports``. An error names the file and, where it can, the line.
    """
    try:
        cfg = Config.fromfile(path)
    except (OSError, ModuleNotFoundError):  # they name the file or the module themselves
        raise
    except SyntaxError as error:  # in this file or in a base of it; the text of the line tells which
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
    """The file and the line of a config, or of a base of it, at which an error arose.

    A config runs as a module. onedl's mmengine compiles it with its name, OpenMMLab's without any.
    """
    run = (frame for frame in reversed(extract_tb(error.__traceback__)) if frame.name == '<module>')
    return next((f'{frame.filename}, line {frame.lineno}' for frame in run if os.path.exists(frame.filename)), None)


def enter_scope(cfg: Config) -> None:
    """Makes names without a scope mean what they mean in the config's own package."""
    init_default_scope(cfg.get('default_scope', 'mmengine'))


def build(cfg: Config, **changes: Any) -> Any:
    """The config's model in evaluation mode, without pretrained weights; ``changes`` replace settings of the model."""
    enter_scope(cfg)
    if 'model' not in cfg:
        raise UserError(f'{cfg.filename} has no model.')
    settings = copy.deepcopy(dict(cfg.model, **changes))
    if cfg.get('data_preprocessor'):  # as mmengine's Runner does
        settings.setdefault('data_preprocessor', cfg.data_preprocessor)
    model = MODELS.build(settings)
    model.eval()  # not every model of MM returns itself
    return model


def build_backbone(cfg: Config) -> Any:
    """The backbone alone of the config's model, in evaluation mode, without pretrained weights."""
    enter_scope(cfg)
    backbone = MODELS.build(copy.deepcopy(cfg.model.backbone))
    backbone.eval()
    return backbone


def load(config: str, checkpoint: str) -> TrainedModel:
    """Builds the model of a config, and fills it with a checkpoint whose tensors are exactly those of the model."""
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
