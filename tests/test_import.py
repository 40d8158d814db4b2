"""Checks what ``import mmdtn`` needs and imports, in a separate process."""

import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {missing!r}:
            raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)

sys.meta_path.insert(0, Missing())
import mmdtn
"""


def run(program: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, '-c', program], capture_output=True, text=True, cwd=Path(__file__).parents[1]
    )


@pytest.mark.slow
def test_it_needs_neither_detection_nor_plots_nor_unix():
    """The import also registers the classes that configs name."""
    program = WITHOUT.format(missing=('mmdet', 'mmpretrain', 'mmcv', 'resource', 'matplotlib', 'pycocotools'))
    program += """
from mmengine.registry import DATA_SAMPLERS, HOOKS, LOOPS, MODELS, OPTIM_WRAPPERS
for registry, names in (
    (MODELS, ('DTN', 'DTN2d', 'PVTDTN', 'SwinDTN', 'ViTDTN', 'DINO', 'DINOHead', 'LinearProbe')),
    (HOOKS, ('CheckClassesHook', 'CheckWeightsHook', 'DINOHook', 'DTNMonitorHook', 'MissedValidationHook',
             'PendingGradientsHook', 'ProgressHook', 'SkipBrokenImagesHook',
             'StopOnNonFiniteHook', 'WholeCheckpointHook')),
    (LOOPS, ('KNNLoop', 'ResumableEpochLoop', 'ResumableIterLoop', 'ResumableLoop')),
    (DATA_SAMPLERS, ('NumberedBatchSampler',)),
    (OPTIM_WRAPPERS, ('BFloat16OptimWrapper',)),
):
    for name in names:
        assert name in registry.module_dict, name
rooms = {name.split('.')[1] for name in sys.modules if name.startswith('mmdtn.')}
assert not rooms & {'analysis', 'export', 'models', 'reports', 'studies', 'doctor'}, rooms
"""
    done = run(program)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_without_opencv_a_sentence_says_what_to_install():
    """The import warns, so that the doctor can run. Using the package then raises an error."""
    done = run(WITHOUT.format(missing=('cv2',)))
    assert done.returncode == 0 and 'mmdtn needs cv2: pip install opencv-python-headless' in done.stderr
    done = run(WITHOUT.format(missing=('cv2',)) + 'from mmdtn import convert_norms')
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith('ModuleNotFoundError: mmdtn needs cv2') and 'pip install opencv-python-headless' in last
