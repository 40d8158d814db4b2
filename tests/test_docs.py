"""Checks README and docs: links resolve, commands exist with the options that are shown, and code runs."""

import re

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from mmdtn.surgery.fusion import fuse

from .pages import PAGES, REPO, commands, named


def links(page):
    """Returns the link targets in the repository. The badge links to GitHub's pages instead."""
    targets = re.findall(r'\]\(([^)]+)\)', page.read_text())
    return [target for target in targets if not target.startswith(('http', '../../actions/'))]


def test_every_page_is_reached_and_none_is_a_dead_end():
    pages = {page: {(page.parent / target.partition('#')[0]).resolve() for target in links(page)} for page in PAGES}
    reached, todo = set(), [REPO / 'README.md']
    while todo:
        page = todo.pop()
        reached.add(page)
        todo += pages.get(page, set()) - reached
    assert {named(page) for page in PAGES} <= {named(page) for page in reached if page.is_relative_to(REPO)}
    assert [named(page) for page in PAGES if not pages[page] & {*PAGES} - {page}] == []


@pytest.mark.parametrize('page', PAGES, ids=named)
def test_relative_links_resolve(page):
    for target in links(page):
        path, _, anchor = target.partition('#')
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r'^#+ (.+)$', linked.read_text(), re.M)
            assert anchor in {re.sub(r'[^\w -]', '', h).lower().replace(' ', '-') for h in headings}, target


@pytest.mark.parametrize('line', [pytest.param(line, id=f'{page}: {line[:60]}') for line, page in commands().items()])
def test_commands_exist_with_their_options(line):
    words = re.sub(r'^([A-Z_]+=\S+ )+', '', line).split()
    if words[0] == 'make':
        targets = [word for word in words[1:] if '=' not in word]
        assert all(re.search(rf'^{target}:', (REPO / 'Makefile').read_text(), re.M) for target in targets)
        return
    if words[:2] == ['python', '-m']:
        assert (REPO / (words[2].replace('.', '/') + '.py')).exists()
        return
    if words[:2] == ['python', '-c']:
        return
    script = REPO / (words[1] if words[0] == 'python' else words[0])
    assert script.exists()
    assert not re.search(r'/\S+\.py\b', ' '.join(words[2:])) or all(
        (REPO / word).exists() for word in words[2:] if word.startswith('configs/') and '{' not in word
    )
    source = script.read_text() + (REPO / 'tools' / 'train.py').read_text() * script.name.endswith('train.sh')
    source += ''.join(p.read_text() for p in (REPO / 'mmdtn' / 'engine').glob('launch.py'))
    for option in (word for word in words if word.startswith('--')):
        assert f"'{option}'" in source, option


def test_the_readme_is_read_in_two_minutes():
    assert len((REPO / 'README.md').read_text().splitlines()) <= 120


def test_the_layers_example_runs():
    (code,) = re.findall(r'((?: {4}.*DTN.*\n){4})', (REPO / 'docs' / 'api.md').read_text())
    height, width = 5, 7
    names = dict(
        tokens=torch.randn(2, height, width, 64), image=torch.randn(2, 64, height, width), height=height, width=width
    )
    lines = [line.strip() for line in code.splitlines()]
    exec(lines[0], names)
    assert [tuple(eval(lines[1], names).shape), tuple(eval(lines[3], names).shape)] == [(2, 5, 7, 64), (2, 64, 5, 7)]
    names['tokens'] = torch.randn(2, 35, 64)
    assert eval(lines[2], names).shape == (2, 35, 64)


def test_the_other_examples_of_the_api_run():
    text = (REPO / 'docs' / 'api.md').read_text()
    (build,) = re.findall(r'((?: {4}.*build_norm.*\n){2})', text)
    names = {}
    *imports, last = (line.strip() for line in build.splitlines())
    exec('\n'.join(imports), names)
    assert repr(eval(last, names)) == 'DTN(64, num_heads=4, pool_size=2)'
    imports, last = re.findall(r' {4}(from mmdtn\.ops .+)\n {4}(.+)\n', text)[0]
    vectors = dict(weight=torch.ones(8), bias=torch.zeros(8), position=torch.zeros(2, 3))
    names = vectors | dict(tokens=torch.randn(1, 4, 6, 8), mean_lambda=torch.rand(2), var_lambda=torch.rand(2))
    exec(imports, names)
    assert eval(last, names).shape == (1, 4, 6, 8)


@pytest.mark.parametrize('page', ['README.md', 'docs/configs.md'])
def test_the_detector_of_your_own_is_one(tmp_path, page):
    (block,) = re.findall(r'((?: {4}.*\n)+)', (REPO / page).read_text().partition(' of your own\n')[2])[:1]
    (tmp_path / 'mine.py').write_text('\n'.join(line[4:] for line in block.splitlines()))
    cfg = Config.fromfile(tmp_path / 'mine.py')
    assert cfg.custom_imports.imports == ['mmdtn'], 'here it is imported already, but not where this is used'
    backbone = MODELS.build(cfg.model.backbone)
    assert [m.shape[1] for m in backbone(torch.randn(1, 3, 64, 64))] == cfg.model.neck.in_channels


def test_the_backbone_that_is_fused_as_a_whole_is(tmp_path):
    section = (REPO / 'docs' / 'fusing.md').read_text().partition(' as a whole\n')[2]
    block = re.findall(r'((?: {4}.*\n)+)', section)[0]
    lines = (line[4:] for line in block.splitlines())
    (tmp_path / 'mine.py').write_text('\n'.join(lines).replace("'configs/", f"'{REPO}/configs/"))
    cfg = Config.fromfile(tmp_path / 'mine.py')
    init_default_scope(cfg.default_scope)
    fused, outcomes = fuse(MODELS.build(cfg.model))
    assert outcomes and all(o.kind == 'FeatureNorm' and o.into for o in outcomes)
    assert not [m for m in fused.modules() if isinstance(m, torch.nn.LayerNorm)]


def norm_cfgs():
    return re.findall(r'^\| `(dict\(type=.+?\))` \|', (REPO / 'docs' / 'configs.md').read_text(), re.M)


@pytest.mark.parametrize('text', norm_cfgs())
def test_the_guides_norm_cfgs_build(text):
    from mmdtn.backbones import PVTDTN

    PVTDTN('b0', norm_cfg=eval(text))


def test_troubleshooting_quotes_messages_that_exist():
    """The fixed words of each message of this package have to be in its source."""
    ours = ''.join(p.read_text() for folder in ('mmdtn', 'tools') for p in (REPO / folder).rglob('*.py'))
    ours = re.sub(r"['\"]\s*\n\s*f?['\"]", '', ours)
    table = (REPO / 'docs' / 'troubleshooting.md').read_text()
    for quoted in (
        'does not divide num_features',
        'DTN takes B x H x W x C',
        'The class token cannot join before block',
        'DTN runs in plain torch, several times slower, as its C++ could not be built (',
        'There is no checkpoint',
        'The target has DTN layers, but the file has no',
        'A warm start needs norm_cfg=',
        'These tensors do not fit',
        'is damaged: the checksum of its part',
        'not a checkpoint that can be loaded without running code from it',
        'has no auto_scale_lr.base_batch_size',
        'the loss is',
    ):
        assert quoted in table
        words = quoted.replace('num_features', '').replace('B x H x W x C', 'B x H x W x').strip()
        assert words in ours, words
