"""Checkpoints are downloaded once, completely or not at all, with a helpful message on failure."""

import hashlib
import http.server
import multiprocessing
import threading
import time

import pytest
import torch
from safetensors.torch import save, save_file

from mmdtn.backbones import PVTDTN
from mmdtn.checkpoints import load, read, translate
from mmdtn.checkpoints.fetch import NotFetched, fetch, local_copy

from .test_damaged_files import SMALL, as_bytes, small_state

CONTENT = as_bytes(dict(a=torch.arange(10000.0)))


class Handler(http.server.BaseHTTPRequestHandler):
    """Sends the server's answer for a path: a status, a content length, and bytes."""

    def do_GET(self):
        self.server.fetched.append(self.path)
        time.sleep(0.3)  # long enough for other processes to ask as well
        status, length, body = self.server.answers[self.path]
        self.send_response(status)
        self.send_header('Content-Length', str(length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv('TORCH_HOME', str(tmp_path / 'home'))
    monkeypatch.setenv('no_proxy', '127.0.0.1')
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
        server.fetched, server.answers = [], {}
        server.url = f'http://127.0.0.1:{server.server_port}'
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def files(path):
    return [p for p in path.rglob('*') if p.is_file() and p.suffix != '.lock']


def test_eight_processes_fetch_a_file_once_with_progress(server, tmp_path, capfd):
    server.answers['/v2/pvt.pth'] = (200, len(CONTENT), CONTENT)
    with multiprocessing.get_context('fork').Pool(8) as pool:
        paths = pool.map(fetch, [f'{server.url}/v2/pvt.pth'] * 8, chunksize=1)
    assert server.fetched == ['/v2/pvt.pth']
    assert {p.read_bytes() for p in paths} == {CONTENT} and files(tmp_path) == [paths[0]]
    assert 'Fetching pvt.pth: 100%' in capfd.readouterr().err
    assert torch.equal(load(f'{server.url}/v2/pvt.pth')['a'], torch.arange(10000.0)) and len(server.fetched) == 1


def test_a_cut_connection_leaves_nothing_and_the_next_try_fetches(server, tmp_path):
    url = f'{server.url}/pvt.pth'
    server.answers['/pvt.pth'] = (200, len(CONTENT), CONTENT[:5000])
    with pytest.raises(NotFetched, match=f'after 5000 of {len(CONTENT)} bytes'):
        fetch(url)
    assert files(tmp_path) == []
    server.answers['/pvt.pth'] = (200, len(CONTENT), CONTENT)
    assert fetch(url).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ('name', 'body', 'reason'),
    [
        ('pvt.pth', b'<!DOCTYPE html> please log in', 'not a checkpoint, .*DOCTYPE'),
        ('pvt.pth', b'', 'not a checkpoint'),
        ('pvt-0123abcd.pth', CONTENT, f'start with 0123abcd.*but is {hashlib.sha256(CONTENT).hexdigest()[:8]}'),
    ],
)
def test_a_wrong_file_leaves_nothing(server, tmp_path, name, body, reason):
    server.answers[f'/{name}'] = (200, len(body), body)
    with pytest.raises(NotFetched, match=reason):
        fetch(f'{server.url}/{name}')
    assert files(tmp_path) == []


@pytest.mark.parametrize('ending', [hashlib.sha256(CONTENT).hexdigest()[:8], '20210416'])
def test_the_right_checksum_passes_and_a_date_is_none(server, ending):
    server.answers[f'/pvt-{ending}.pth'] = (200, len(CONTENT), CONTENT)
    assert fetch(f'{server.url}/pvt-{ending}.pth').read_bytes() == CONTENT


def test_without_a_network_the_message_says_what_to_download_and_where_to_put_it(server):
    server.answers['/gone.pth'] = (404, 0, b'')
    closed = http.server.HTTPServer(('127.0.0.1', 0), Handler)
    closed.server_close()
    nowhere = f'http://127.0.0.1:{closed.server_port}/a/pvt.pth'
    for url, reason in ((nowhere, 'refused'), (f'{server.url}/gone.pth', 'Not Found')):
        with pytest.raises(NotFetched, match=reason) as error:
            load(url)
        assert url in str(error.value) and f'save it as {local_copy(url)}' in str(error.value)
    local_copy(nowhere).parent.mkdir(parents=True, exist_ok=True)
    local_copy(nowhere).write_bytes(CONTENT)
    assert load(nowhere)['a'].shape == (10000,)


def test_files_of_one_name_from_two_places_are_two_files():
    urls = [f'https://example.org/{owner}/resolve/main/model.safetensors' for owner in ('a', 'b', '..')]
    urls += ['https://example.org/get?id=1', 'https://example.org/get?id=2']
    places = [local_copy(url) for url in urls]
    assert len(set(places)) == 5 and all('..' not in p.parts for p in places)


def test_safetensors_fill_a_backbone(server, tmp_path):
    state = {key: value.contiguous() for key, value in small_state().items()}
    save_file(state, tmp_path / 'pvt.safetensors')
    body = save(state)
    server.answers['/model.safetensors?download=true'] = (200, len(body), body)
    for source in (tmp_path / 'pvt.safetensors', f'{server.url}/model.safetensors?download=true'):
        init_cfg = dict(type='Pretrained', checkpoint=str(source))
        model = PVTDTN(SMALL, norm_cfg=dict(type='LN'), init_cfg=init_cfg)
        model.init_weights()
        right, _ = translate(state, model)
        assert all(torch.equal(model.state_dict()[key], value) for key, value in right.items())
    (tmp_path / 'cut.safetensors').write_bytes(body[:-100])
    with pytest.raises(ValueError, match='damaged safetensors'):
        read(tmp_path / 'cut.safetensors')
