"""What training and testing without a GPU needs: mixed precision, processes that talk through gloo, and memory."""

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from mmengine.config import Config
from mmengine.dist import init_dist, is_distributed
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS, STRATEGIES
from mmengine.runner import autocast
from torch import nn

from mmdtn.registry import class_of

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
LOCAL_RANKS = dict(pytorch='LOCAL_RANK', slurm='SLURM_LOCALID', mpi='OMPI_COMM_WORLD_LOCAL_RANK')


@OPTIM_WRAPPERS.register_module()
class BFloat16OptimWrapper(OptimWrapper):
    """Runs the model under bfloat16 autocast. Its range is float32's, so the loss needs no scaling.

    mmengine's ``AmpOptimWrapper`` insists on a GPU, for its scaler.
    """

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        with super().optim_context(model), autocast(dtype=torch.bfloat16):
            yield


def keep_freed_memory() -> None:
    """Has glibc keep what is freed for the next tensor, as PyTorch does on GPUs.

    It would give large blocks back to the system and get them again, page by page and zeroed, many times a step.
    """
    if platform.libc_ver()[0] == 'glibc':
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)


def run_on_cpu(cfg: Config) -> None:
    """Changes a config written for NCCL so that its processes talk through gloo, and starts that.

    mmengine would ask CUDA for a device on the way to every process group, and hand a device number to DDP, which
    wants none for a model on the CPU. A process group that exists already, it takes as it is.
    """
    env_cfg = cfg.get('env_cfg') or {}
    dist_cfg = dict(env_cfg.get('dist_cfg') or {}, backend='gloo')
    cfg.env_cfg = dict(env_cfg, dist_cfg=dist_cfg)
    if cfg.get('strategy'):
        _shard_on_cpu(cfg)
    else:
        wrapper = cfg.get('model_wrapper_cfg') or dict(
            type='MMDistributedDataParallel',
            broadcast_buffers=False,
            find_unused_parameters=cfg.get('find_unused_parameters', False),
        )
        cfg.model_wrapper_cfg = dict(wrapper, device_ids=None)
    if not is_distributed():
        # mmengine offers no process group without torch.cuda.set_device(local rank); torch ignores a negative rank.
        variable = LOCAL_RANKS[cfg.launcher]
        local_rank = os.environ.get(variable, '0')
        os.environ[variable] = '-1'
        init_dist(cfg.launcher, **dist_cfg)
        os.environ[variable] = os.environ['LOCAL_RANK'] = local_rank


def _shard_on_cpu(cfg: Config) -> None:
    from mmengine._strategy import FSDPStrategy  # the name that mmengine's documentation imports it by

    if not issubclass(class_of(cfg.strategy, STRATEGIES), FSDPStrategy):
        return
    cfg.strategy.model_wrapper = dict(cfg.strategy.get('model_wrapper') or {}, device_id='cpu')
    if cfg.strategy.get('state_dict_cfg') == 'full':
        # 'full' copies the gathered weights to the CPU. From the CPU to the CPU nothing is copied, and torch reads
        # memory that it has freed.
        here = dict(rank0_only=True, offload_to_cpu=False)
        cfg.strategy.state_dict_cfg = dict(
            state_dict_type='FULL_STATE_DICT',
            state_dict_config=dict(type='FullStateDictConfig', **here),
            optim_state_dict_config=dict(type='FullOptimStateDictConfig', **here),
        )
