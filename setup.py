"""Links configs and tools into the package. All metadata is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup

here = Path(__file__).parent

# `mim` and `_base_ = 'mmdtn::...'` look for these files in the installed package. An editable install keeps the links.
mim = here / 'mmdtn' / '.mim'
mim.mkdir(exist_ok=True)
for name in ('configs', 'tools', 'model-index.yml'):
    inside = mim / name
    if not inside.exists():
        try:
            inside.symlink_to(Path('..', '..', name))
        except OSError:  # most Windows users cannot create links
            (shutil.copytree if (here / name).is_dir() else shutil.copy)(here / name, inside)

setup()
