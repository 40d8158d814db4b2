"""Training and testing without a GPU: mixed precision, process groups and memory allocation."""

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

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # from malloc.h of glibc
LOCAL_RANKS = dict(pytorch='LOCAL_RANK', slurm='SLURM_LOCALID', mpi='OMPI_COMM_WORLD_LOCAL_RANK')


@OPTIM_WRAPPERS.register_module()
class BFloat16OptimWrapper(OptimWrapper):
    """Optimizer wrapper that runs the model under bfloat16 autocast.

    bfloat16 has the same range as float32, so the loss needs no scaling. MMEngine's ``AmpOptimWrapper`` requires a GPU
    because of its gradient scaler.
    """

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        with super().optim_context(model), autocast(dtype=torch.bfloat16):
            yield


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for later tensors, as PyTorch's caching allocator does on GPUs.

    By default, glibc returns large blocks to the operating system. Every step then requests these blocks again, and the
    operating system zeroes them page by page.
    """
    if platform.libc_ver()[0] == 'glibc':
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)


def run_on_cpu(cfg: Config) -> None:
    """Configures a run to communicate through gloo, and initialises the process group.

    MMEngine sets a CUDA device when it initialises a process group, but not when a process group already exists.
    MMEngine also passes a device number to DDP, but DDP must not receive one for a model on the CPU.
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
        # MMEngine's init_dist always calls torch.cuda.set_device(local_rank). PyTorch ignores a negative rank.
        variable = LOCAL_RANKS[cfg.launcher]
        local_rank = os.environ.get(variable, '0')
        os.environ[variable] = '-1'
        init_dist(cfg.launcher, **dist_cfg)
        os.environ[variable] = os.environ['LOCAL_RANK'] = local_rank


def _shard_on_cpu(cfg: Config) -> None:
    from mmengine._strategy import FSDPStrategy  # mmengine's documentation uses this import path

    if not issubclass(class_of(cfg.strategy, STRATEGIES), FSDPStrategy):
        return
    cfg.strategy.model_wrapper = dict(cfg.strategy.get('model_wrapper') or {}, device_id='cpu')
    if cfg.strategy.get('state_dict_cfg') == 'full':
        # With 'full', FSDP moves the gathered weights to the CPU. If the weights are already on the CPU, FSDP copies
        # nothing, and torch then reads freed memory.
        here = dict(rank0_only=True, offload_to_cpu=False)
        cfg.strategy.state_dict_cfg = dict(
            state_dict_type='FULL_STATE_DICT',
            state_dict_config=dict(type='FullStateDictConfig', **here),
            optim_state_dict_config=dict(type='FullOptimStateDictConfig', **here),
        )
