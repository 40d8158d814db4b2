"""Truncated, damaged and changed files are either loaded correctly or raise an error that states the reason."""

import http.server
import io
import random
import sys
import threading

import pytest
import timm
import torch

from mmdtn.backbones import PVTDTN
from mmdtn.checkpoints import read, translate
from tools.model_converters import convert as command

SMALL = dict(base='b0', depths=(1, 1, 1, 1), widths=(8, 16, 40, 64), mlp_ratios=(1, 1, 1, 1))


def small_state():
    torch.manual_seed(0)
    peer = timm.create_model(
        'pvt_v2_b0', depths=(1, 1, 1, 1), embed_dims=(8, 16, 40, 64), mlp_ratios=(1, 1, 1, 1), num_classes=3
    )
    return dict(peer.state_dict())


def as_bytes(checkpoint, **options):
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer, **options)
    return buffer.getvalue()


def backbone():
    return PVTDTN(SMALL, norm_cfg=dict(type='LN'), out_type='cls_token')


def drop(state, rng):
    del state[rng.choice(list(state))]


def rename(state, rng):
    key = rng.choice(list(state))
    at = rng.randrange(len(key))
    state[key[:at] + rng.choice('xyz_.0') + key[at + 1 :]] = state.pop(key)


def reshape(state, rng):
    key = rng.choice(list(state))
    value = state[key]
    state[key] = rng.choice([value.flatten()[:-1], value[None], value.flatten()[:, None], value[..., :0]])


def retype(state, rng):
    key = rng.choice(list(state))
    state[key] = rng.choice([state[key].long(), state[key].bool(), state[key] * float('nan'), 'text', [1.0], None])


def flip(data, rng):
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def cut(data, rng):
    return data[: rng.randrange(len(data))]


@pytest.mark.parametrize('seed', range(120))
def test_a_changed_file_is_refused_or_read_right(seed, tmp_path):
    rng = random.Random(seed)
    state = small_state()
    right, _ = translate(state, backbone())
    change = (drop, rename, reshape, retype, flip, cut)[seed % 6]
    if change in (flip, cut):
        data = change(as_bytes(state), rng)
    else:
        change(state, rng)
        data = as_bytes(state)
    (tmp_path / 'file.pth').write_bytes(data)
    try:
        got, _ = translate(read(tmp_path / 'file.pth'), backbone())
    except ValueError as error:
        assert 20 < len(str(error)) < 1000
        return
    assert change in (drop, rename, retype, reshape, flip)  # of the classifier that a backbone has no use for, and
    assert got.keys() == right.keys()  # of bytes between the parts of a zip file
    for key, value in right.items():
        assert torch.equal(got[key], value), key


def test_files_of_other_kinds_are_refused_and_run_nothing(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / 'was_here'), 'w'))

    contents = {
        'evil': as_bytes(dict(state_dict=small_state(), evil=Evil())),
        'module': as_bytes(torch.nn.Linear(2, 2)),
        'list': as_bytes([1, 2]),
        'empty': b'',
        'text': b'this is no checkpoint',
        'old and cut': as_bytes(small_state(), _use_new_zipfile_serialization=False)[:-100],
        'no weights': as_bytes(dict(state_dict=dict(), epoch=3)),
    }
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=name):
            read(tmp_path / name)
    assert not (tmp_path / 'was_here').exists()
    with pytest.raises(FileNotFoundError, match='missing'):
        read(tmp_path / 'missing')


@pytest.mark.parametrize('old', [False, True])
def test_what_mmengine_saves_is_read(tmp_path, old):
    import numpy as np
    from mmengine.logging import MessageHub

    hub = MessageHub.get_instance('files')
    hub.update_scalar('train/loss', 1.0)
    hub.update_info('epoch', np.int64(3))
    state = small_state()
    checkpoint = dict(
        state_dict={f'module.{key}': value for key, value in state.items()},
        message_hub=hub.state_dict(),
        optimizer=torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))]).state_dict(),
        meta=dict(epoch=1, time='now', random=np.random.get_state(), score=np.float32(1)),
    )
    torch.save(checkpoint, tmp_path / 'epoch_1.pth', _use_new_zipfile_serialization=not old)
    got = read(tmp_path / 'epoch_1.pth')
    assert got.keys() == state.keys() and all(torch.equal(got[key], state[key]) for key in state)
    assert hub.get_scalar('train/loss').mean() == 1, "reading leaves mmengine's own logs alone"


@pytest.mark.parametrize(
    ('change', 'words'),
    [
        (
            lambda s: s.clear() or s.update({'conv1.weight': torch.zeros(1)}),
            r'Tried the formats pvt, mmdet-pvt.*fit none',
        ),
        (lambda s: s.update({'patch_embed1.x': s['head.bias'], 'block1.0.x': s['head.bias']}), 'fit .*pvt.*timm-pvt'),
        (lambda s: s.pop('stages.1.blocks.0.norm1.bias'), r'no stages\.1\.blocks\.0\.norm1\.bias'),
        (
            lambda s: s.update({'stages.0.blocks.0.norm1.bias': torch.zeros(9)}),
            r'norm1\.bias .*\(9,\) .*\(8,\) ',
        ),
        (lambda s: s.update({'stages.0.blocks.1.norm1.bias': torch.zeros(8)}), r'stages\.0\.blocks\.1\.norm1'),
        (lambda s: s.update({'extra.weight': torch.zeros(8)}), r'extra\.weight .*timm'),
    ],
)
def test_errors_name_what_does_not_fit(change, words):
    state = small_state()
    change(state)
    with pytest.raises(ValueError, match=words):
        translate(state, backbone())


def test_embeddings_resize_only_when_asked():
    small = PVTDTN(dict(SMALL, version=1), norm_cfg=dict(type='LN'), img_size=96)
    large = PVTDTN(dict(SMALL, version=1), norm_cfg=dict(type='LN'), img_size=224)
    with pytest.raises(ValueError, match=r'pos_embed .*24, 24.*56, 56.*--resize'):
        translate(small.state_dict(), large)
    state, report = translate(small.state_dict(), large, resize=True)
    assert state['stages.0.pos_embed'].shape == (1, 56, 56, 8)
    assert report.filled['stages.0.pos_embed'] == 'resized from (1, 24, 24, 8) to (1, 56, 56, 8)'


def test_nothing_is_left_behind_where_conversion_fails(tmp_path, monkeypatch):
    state = small_state()
    state.pop('stages.1.blocks.0.norm1.bias')
    torch.save(state, tmp_path / 'broken.pth')
    monkeypatch.setattr(
        sys, 'argv', ['convert.py', f'{tmp_path}/broken.pth', '--to', 'b0', '--out', f'{tmp_path}/o.pth']
    )
    with pytest.raises(SystemExit, match=r'broken\.pth was not converted'):
        command.main()
    assert [p.name for p in tmp_path.iterdir()] == ['broken.pth']


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    from mmdtn.checkpoints import write

    write(tmp_path / 'model.pth', dict(state_dict=dict(a=torch.ones(1))))

    def full(checkpoint, file):
        file.write(b'half of it')
        raise OSError('No space left on device')

    monkeypatch.setattr(torch, 'save', full)
    with pytest.raises(OSError, match='No space'):
        write(tmp_path / 'model.pth', dict(state_dict=dict(a=torch.zeros(1))))
    assert [p.name for p in tmp_path.iterdir()] == ['model.pth']
    assert read(tmp_path / 'model.pth')['a'] == 1


def test_bias_tables_resize_only_when_asked():
    from mmdtn.backbones import SwinDTN

    arch = dict(base='tiny', depths=(1, 1, 1, 1), width=24, num_heads=(1, 2, 2, 2))
    small, large = (SwinDTN(arch, norm_cfg=dict(type='LN'), window_size=side) for side in (4, 7))
    key = 'stages.1.blocks.0.attn.relative_position_bias_table'
    torch.nn.init.normal_(small.get_parameter(key))
    with pytest.raises(ValueError, match=r'bias_table .*49, 1.*169, 1.*--resize'):
        translate(small.state_dict(), large)
    state, report = translate(small.state_dict(), large, resize=True)
    for there, here in ((24, 84), (0, 0), (6, 12), (42, 156), (48, 168)):  # no shift, and the four largest
        torch.testing.assert_close(state[key][here], small.get_parameter(key)[there], atol=1e-4, rtol=1e-4)
    assert report.filled[key] == 'resized from (49, 2) to (169, 2)'


def test_biases_by_distance_resize_only_when_asked():
    from mmdtn.backbones import LeViTDTN

    arch = dict(base='128s', depths=(1, 1, 1), widths=(16, 32, 48), key_width=8)
    small, large = (LeViTDTN(arch, norm_cfg=None, img_size=side) for side in (64, 112))
    key = 'stages.0.blocks.0.attn.attention_biases'
    torch.nn.init.normal_(small.get_parameter(key))
    with pytest.raises(ValueError, match=r'attention_biases .*4, 16.*4, 49.*--resize'):
        translate(small.state_dict(), large)
    state, report = translate(small.state_dict(), large, resize=True)
    before, after = small.get_parameter(key).view(4, 4, 4), state[key].view(4, 7, 7)
    torch.testing.assert_close(after[:, ::2, ::2], before, atol=1e-5, rtol=1e-5)  # 0, 1, 2, 3 at 0, 2, 4, 6
    assert report.filled[key] == 'resized from (4, 16) to (4, 49)'
    large.load_state_dict(state)


@pytest.mark.parametrize('two_heads', [False, True])
def test_heads_of_levit_and_of_vision_transformers_find_their_names(two_heads):
    from mmengine.registry import MODELS, init_default_scope

    from . import published

    init_default_scope('mmpretrain')

    def classifier(backbone, **head):
        return MODELS.build(
            dict(type='mmpretrain.ImageClassifier', backbone=backbone, head=dict(head, num_classes=1000))
        )

    mine = classifier(published.LEVIT, type='LeViTClsHead', in_channels=384, distillation=two_heads)
    for make in (published.timm_levit, published.levit):
        file = make().file
        file = file.get('model', file)
        state, report = translate(file, mine)
        name = 'head.linear.weight' if make is published.timm_levit else 'head.l.weight'
        assert torch.equal(state['head.head.linear.weight'], file[name])
        dropped = {key for key in report.dropped if 'bias_idxs' not in key}
        assert bool(dropped) == (not two_heads) and all('head_dist' in key for key in dropped)
        if two_heads:
            assert torch.equal(state['head.head_dist.bn.weight'], file['head_dist.bn.weight'])
    vit = classifier(dict(type='T2TViTDTN', norm_cfg=dict(type='LN')), type='VisionTransformerClsHead', in_channels=384)
    linear = classifier(dict(type='T2TViTDTN', norm_cfg=dict(type='LN')), type='LinearClsHead', in_channels=384)
    for make in (published.t2t, published.mmpretrain_t2t):
        (file,) = make().file.values()
        weight = file.get('head.weight', file.get('head.layers.head.weight'))
        for model, name in ((vit, 'head.layers.head.weight'), (linear, 'head.fc.weight')):
            assert torch.equal(translate(file, model)[0][name], weight)


def test_a_url_is_fetched_once(tmp_path, monkeypatch):
    folder = tmp_path / 'served'
    folder.mkdir()
    (folder / 'b0.pth').write_bytes(as_bytes(small_state()))
    fetched = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, directory=str(folder), **kwargs)

        def log_message(self, *args):
            fetched.append(self.path)

    monkeypatch.setenv('TORCH_HOME', str(tmp_path / 'home'))
    monkeypatch.setenv('no_proxy', '127.0.0.1')
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f'http://127.0.0.1:{server.server_port}/b0.pth'
        for _ in range(2):
            model = PVTDTN(SMALL, norm_cfg=dict(type='LN'), init_cfg=dict(type='Pretrained', checkpoint=url))
            model.init_weights()
        server.shutdown()
    assert fetched == ['/b0.pth']
    right, _ = translate(small_state(), model)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in right.items())
