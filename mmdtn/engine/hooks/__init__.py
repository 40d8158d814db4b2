from .adaptive_clip import AdaptiveClipHook
from .check_classes import CheckClassesHook
from .check_weights import CheckWeightsHook, StartFromWeightsHook
from .dtn_monitor import DTNMonitorHook
from .missed_validation import MissedValidationHook
from .pending_gradients import PendingGradientsHook
from .progress import ProgressHook
from .skip_broken_images import SkipBrokenImagesHook
from .stop_on_nonfinite import StopOnNonFiniteHook
from .whole_checkpoint import WholeCheckpointHook

__all__ = [
    'AdaptiveClipHook',
    'CheckClassesHook',
    'CheckWeightsHook',
    'DTNMonitorHook',
    'MissedValidationHook',
    'PendingGradientsHook',
    'ProgressHook',
    'SkipBrokenImagesHook',
    'StartFromWeightsHook',
    'StopOnNonFiniteHook',
    'WholeCheckpointHook',
]
