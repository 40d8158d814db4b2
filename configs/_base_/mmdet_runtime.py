# Extends MMDetection's runtime with the runtime of this project.
_base_ = ['mmdet::_base_/default_runtime.py', './runtime.py']
custom_imports = _base_.runtime.custom_imports
default_hooks = _base_.runtime.default_hooks
custom_hooks = _base_.runtime.custom_hooks
visualizer = _base_.runtime.visualizer
