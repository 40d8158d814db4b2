"""MMEngine fetches and reads checkpoints with the loaders of this package, for ``load_from`` and for tests."""

import torch
from mmengine.runner import CheckpointLoader
from safetensors.torch import save_file

from mmdtn.checkpoints.fetch import local_copy
from mmdtn.engine.checkpoint_loaders import register_loaders


def test_mmengine_reads_safetensors_also_from_a_url(tmp_path, monkeypatch):
    monkeypatch.setenv('TORCH_HOME', str(tmp_path))
    monkeypatch.setattr(CheckpointLoader, '_schemes', dict(CheckpointLoader._schemes))
    register_loaders()
    url = 'https://example.org/model.safetensors'
    place = local_copy(url)
    place.parent.mkdir(parents=True)
    save_file(dict(a=torch.ones(3)), place)
    for source in (str(place), url):
        checkpoint = CheckpointLoader.load_checkpoint(source, map_location='cpu')
        assert torch.equal(checkpoint['state_dict']['a'], torch.ones(3))
