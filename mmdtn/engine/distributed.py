"""Many processes on a machine without a GPU."""

import os

from mmengine.config import Config
from mmengine.dist import init_dist, is_distributed
from mmengine.registry import STRATEGIES

from mmdtn.registry import class_of

LOCAL_RANKS = dict(pytorch='LOCAL_RANK', slurm='SLURM_LOCALID', mpi='OMPI_COMM_WORLD_LOCAL_RANK')


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
        # mmengine calls torch.cuda.set_device(local rank) whatever the backend; torch ignores a negative one.
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
