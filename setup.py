import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version = re.search(r"__version__ = '(.+)'", (here / 'mmdtn/__init__.py').read_text())[1]

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

setup(
    name='mmdtn',
    version=version,
    description='Dynamic Token Normalization for MMDetection and MMPretrain',
    long_description=(here / 'README.md').read_text(),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    packages=find_packages(include=['mmdtn', 'mmdtn.*']),
    package_data={'mmdtn': ['.mim/model-index.yml', '.mim/**/*.py', '.mim/**/*.sh', '.mim/**/*.yml', '.mim/**/*.md']},
    python_requires='>=3.10',
    # mmengine, mmcv, mmdet and mmpretrain are not named: OpenMMLab's and onedl's packages import alike, and a
    # requirement on one would install it over the other. `python -m mmdtn.doctor` tells what is missing.
    install_requires=['numpy', 'timm>=1.0.9', 'torch>=2.4'],
)
