"""Links configs and tools into the package; everything else that setuptools wants to know is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup

here = Path(__file__).parent

# What `mim` and `_base_ = 'mmdtn::...'` look for inside an installed package; an editable one keeps the links.
mim = here / 'mmdtn' / '.mim'
mim.mkdir(exist_ok=True)
for name in ('configs', 'tools', 'model-index.yml'):
    inside = mim / name
    if not inside.exists():
        try:
            inside.symlink_to(Path('..', '..', name))
        except OSError:  # Windows, for most users
            (shutil.copytree if (here / name).is_dir() else shutil.copy)(here / name, inside)

setup()
