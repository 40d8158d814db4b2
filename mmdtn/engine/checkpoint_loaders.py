"""Checkpoint loaders for mmengine that read safetensors files and download checkpoints from URLs."""

from typing import Any

from mmengine.runner import CheckpointLoader
from safetensors.torch import load_file

from mmdtn.checkpoints.fetch import fetch


def load_from_url(url: str, map_location: Any = None) -> Any:
    """Loads a checkpoint from a URL. All processes on a machine share one download."""
    return CheckpointLoader.load_checkpoint(str(fetch(url)), map_location)


def load_from_safetensors(path: str, map_location: Any = None) -> dict[str, Any]:
    return dict(state_dict=load_file(path, device=map_location or 'cpu'))


def register_loaders() -> None:
    """Registers the loaders with mmengine for ``load_from``, ``--weights`` and test checkpoints."""
    CheckpointLoader.register_scheme(('http://', 'https://'), load_from_url, force=True)
    CheckpointLoader.register_scheme(r'.*\.safetensors$', load_from_safetensors, force=True)
