import hashlib

import torch
from mmengine.config import Config

from mmdtn.checkpoints import read
from tools.model_converters.publish_model import publish


def test_a_published_file_holds_weights_and_config_alone(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(1, 3)).sum().backward()
    optimizer.step()
    config = "model = dict(type='PVTDTN')\n"
    whole = dict(meta=dict(cfg=config, epoch=12), state_dict=model.state_dict(), optimizer=optimizer.state_dict())
    torch.save(whole | dict(message_hub={}, param_schedulers=[{}]), tmp_path / 'epoch_12.pth')

    out = publish(str(tmp_path / 'epoch_12.pth'), tmp_path / 'model.pth')
    assert sorted(p.name for p in tmp_path.iterdir()) == ['epoch_12.pth', out.name]
    assert out.name == f'model-{hashlib.sha256(out.read_bytes()).hexdigest()[:8]}.pth'
    published = torch.load(out, weights_only=True)
    assert published.keys() == {'meta', 'state_dict'}
    assert Config.fromstring(published['meta']['cfg'], '.py').model.type == 'PVTDTN'
    for name, value in read(out).items():
        assert torch.equal(value, model.state_dict()[name])


def test_the_training_checkpoint_stays_even_if_it_is_named_as_the_output(tmp_path):
    source = tmp_path / 'epoch_12.pth'
    torch.save(dict(meta=dict(cfg=''), state_dict=dict(a=torch.ones(1)), optimizer={}), source)
    content = source.read_bytes()
    publish(str(source), source)
    assert source.read_bytes() == content and len(list(tmp_path.iterdir())) == 2
