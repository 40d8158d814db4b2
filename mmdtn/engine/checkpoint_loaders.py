"""How mmengine gets a checkpoint that it cannot read itself, or that is at a URL."""

from typing import Any

from mmengine.runner import CheckpointLoader
from safetensors.torch import load_file

from mmdtn.checkpoints.fetch import fetch


def load_from_url(url: str, map_location: Any = None) -> Any:
    """Fetches a checkpoint whole or not at all, and once for all processes of a machine."""
    return CheckpointLoader.load_checkpoint(str(fetch(url)), map_location)


def load_from_safetensors(path: str, map_location: Any = None) -> dict[str, Any]:
    return dict(state_dict=load_file(path, device=map_location or 'cpu'))


def register_loaders() -> None:
    """Registers these functions for ``load_from``, ``--weights`` and the checkpoint of a test."""
    CheckpointLoader.register_scheme(('http://', 'https://'), load_from_url, force=True)
    CheckpointLoader.register_scheme(r'.*\.safetensors$', load_from_safetensors, force=True)
