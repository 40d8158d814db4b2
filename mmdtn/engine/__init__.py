from .adaptive_clip_hook import AdaptiveClipHook
from .bfloat16_optim_wrapper import BFloat16OptimWrapper
from .check_classes_hook import CheckClassesHook
from .check_weights_hook import CheckWeightsHook
from .dtn_monitor_hook import DTNMonitorHook
from .missed_validation_hook import MissedValidationHook
from .numbered_batch_sampler import NumberedBatchSampler
from .pending_gradients_hook import PendingGradientsHook
from .progress_hook import ProgressHook
from .resumable_loops import ResumableEpochLoop, ResumableIterLoop
from .skip_broken_images_hook import SkipBrokenImagesHook
from .start_from_weights_hook import StartFromWeightsHook
from .stop_on_nonfinite_hook import StopOnNonFiniteHook
from .whole_checkpoint_hook import WholeCheckpointHook

__all__ = [
    'AdaptiveClipHook',
    'BFloat16OptimWrapper',
    'CheckClassesHook',
    'CheckWeightsHook',
    'DTNMonitorHook',
    'MissedValidationHook',
    'NumberedBatchSampler',
    'PendingGradientsHook',
    'ProgressHook',
    'ResumableEpochLoop',
    'ResumableIterLoop',
    'SkipBrokenImagesHook',
    'StartFromWeightsHook',
    'StopOnNonFiniteHook',
    'WholeCheckpointHook',
]
