from . import hooks
from .cpu import BFloat16OptimWrapper
from .loops import ResumableEpochLoop, ResumableIterLoop
from .numbered_batch_sampler import NumberedBatchSampler

__all__ = ['BFloat16OptimWrapper', 'NumberedBatchSampler', 'ResumableEpochLoop', 'ResumableIterLoop', 'hooks']
