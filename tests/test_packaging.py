"""The wheel brings configs and tools along, and other people's configs inherit from them."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import modelindex
import pytest

import mmdtn
import tools.test
import tools.train

REPO = Path(__file__).parents[1]

USE = """
import mmdtn
from mmengine.config import Config
assert mmdtn.__file__.startswith({site!r}), mmdtn.__file__
cfg = Config.fromfile('mine.py')
assert cfg.model.backbone.type == 'PVTDTN' and cfg.train_cfg.max_epochs == 3
from mmdtn.ops import dtn_cpu
assert str(dtn_cpu.SOURCE).startswith({site!r}) and dtn_cpu.works()
"""


@pytest.mark.slow
def test_a_wheel_is_whole(tmp_path):
    def pip(*arguments):
        command = [sys.executable, '-m', 'pip', '--disable-pip-version-check', *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    source = tmp_path / 'source'  # not the repository, where a build would leave its traces
    tracked = subprocess.run(['git', 'ls-files', '-co', '--exclude-standard'], cwd=REPO, capture_output=True, text=True)
    for name in tracked.stdout.splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((REPO / name).read_bytes())
    pip('wheel', '--no-deps', '--no-build-isolation', '-w', tmp_path, source)
    (wheel,) = tmp_path.glob(f'mmdtn-{mmdtn.__version__}-*.whl')
    site = tmp_path / 'site'
    pip('install', '--no-deps', '--target', site, wheel)
    for folder in ('configs', 'tools'):
        inside = {str(p.relative_to(REPO)) for p in (REPO / folder).rglob('*.py')}
        assert {
            str(p.relative_to(site / 'mmdtn' / '.mim')) for p in (site / f'mmdtn/.mim/{folder}').rglob('*.py')
        } == inside
    assert (site / 'mmdtn/.mim/model-index.yml').exists() and (site / 'mmdtn/.mim/tools/dist_train.sh').exists()
    (distribution,) = importlib.metadata.distributions(name='mmdtn', path=[str(site)])
    assert distribution.read_text('top_level.txt').split() == ['mmdtn'], 'by which mim finds the folder'
    (described,) = {len(modelindex.load(str(root / 'model-index.yml')).models) for root in (REPO, site / 'mmdtn/.mim')}
    assert described > 50

    (tmp_path / 'mine.py').write_text(
        "_base_ = 'mmdtn::pvt/retinanet_pvt-t-dtn_fpn_1x_coco.py'\ntrain_cfg = dict(max_epochs=3)\n"
    )
    use = [sys.executable, '-c', USE.format(site=str(site))]
    env = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'} | {'PYTHONPATH': str(site)}
    done = subprocess.run(use, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_mim_finds_configs_and_scripts_by_their_bare_names():
    """`mim train mmdtn CONFIG.py` looks for the name in the whole package, and refuses one that is there twice."""
    files = [p.name for folder in ('configs', 'tools', 'mmdtn') for p in (REPO / folder).rglob('*.py')]
    for model in modelindex.load(str(REPO / 'model-index.yml')).models:
        assert files.count(Path(model.config).name) == 1, model.config
    scripts = [p.name for p in (REPO / 'tools').rglob('*.py')]
    assert sorted(scripts) == sorted(set(scripts)), '`mim run mmdtn SCRIPT` does the same among the tools'


@pytest.mark.parametrize('parse_args', [tools.train.parse_args, tools.test.parse_args], ids=['train', 'test'])
def test_the_tools_take_what_mim_passes(parse_args, capsys):
    checkpoint = ['checkpoint.pth'] * (parse_args is tools.test.parse_args)
    assert parse_args(['config.py', *checkpoint, '--launcher', 'none', '--work-dir', 'x']).launcher == 'none'
    assert parse_args(['config.py', *checkpoint, '--launcher', 'pytorch', '--local-rank=1']).local_rank == 1
    with pytest.raises(SystemExit):
        parse_args(['--help'])
    assert '--gpus' not in capsys.readouterr().out, 'or mim would pass --gpus 1 or --device cpu, of OpenMMLab 1.0'


def test_the_changelog_begins_with_this_version():
    sections = re.findall(r'^## (.+)$', (REPO / 'CHANGELOG.md').read_text(), re.M)
    assert next(name for name in sections if name != 'Unreleased') == mmdtn.__version__


def test_the_extra_for_export_is_what_the_environment_pins():
    (extra,) = re.findall(r'export = \[(.+)\]', (REPO / 'pyproject.toml').read_text())
    pinned = re.findall(r'^(\w+)==', (REPO / 'requirements/export.txt').read_text(), re.M)
    assert re.findall(r'"(\w+)"', extra) == pinned and len(pinned) == 3


def test_the_index_names_every_family():
    index = (REPO / 'model-index.yml').read_text()
    assert [line.split()[1] for line in index.splitlines()[1:]] == sorted(
        str(p.relative_to(REPO)) for p in REPO.glob('configs/*/metafile.yml')
    )


def test_every_config_is_in_the_metafile_of_its_folder():
    """`mim search` and `mim download` know a config from there."""
    index = modelindex.load(str(REPO / 'model-index.yml'))
    paths = [path.relative_to(REPO).as_posix() for path in REPO.glob('configs/[!_]*/*.py')]
    studies = [path for path in paths if '/studies/' in path and 'variants' in (REPO / path).read_text()]
    assert sorted(m.config for m in index.models) == sorted({*paths} - {*studies})
    for model in index.models:
        assert Path(model.config).stem == model.name and model.in_collection in {c.name for c in index.collections}


@pytest.mark.parametrize('family', ['pvt', 'swin', 'vit'])
def test_metafiles_claim_no_results(family):
    """Nothing was trained with these configs. What the papers report is in the README, and said to be theirs."""
    index = modelindex.load(str(REPO / 'model-index.yml'))
    # MM's metafiles name READMEs from the repository's root; model-index would have them from the metafile's folder.
    assert [error for error in index.check(silent=True) if 'README file' not in error] == []
    models = [m for m in index.models if m.config.startswith(f'configs/{family}/')]
    assert len(models) >= 4
    for model in models:
        assert model.results is None and model.weights is None
        assert (REPO / model.config).exists() and Path(model.config).stem == model.name
    assert 'Nothing has been trained' in ' '.join((REPO / 'configs' / family / 'README.md').read_text().split())
