from .amp import BFloat16OptimWrapper
from .checkpoint import WholeCheckpointHook
from .data import SkipBrokenImagesHook
from .dry_run import DryRunHook
from .monitor import DTNMonitorHook
from .nonfinite import StopOnNonFiniteHook
from .progress import ProgressHook
from .resume import PendingGradientsHook, ResumableEpochLoop, SeedByNumberHook

__all__ = [
    'BFloat16OptimWrapper',
    'DTNMonitorHook',
    'DryRunHook',
    'PendingGradientsHook',
    'ProgressHook',
    'ResumableEpochLoop',
    'SeedByNumberHook',
    'SkipBrokenImagesHook',
    'StopOnNonFiniteHook',
    'WholeCheckpointHook',
]
