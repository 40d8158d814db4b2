import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mmdtn import doctor
from mmdtn.ops import dtn_cpu, triton_check

REPO = Path(__file__).parents[1]
COMPILER = """#!/bin/sh
# Says that it is GCC, leaves out what it is asked to compile, and links an empty library.
case "$*" in
  *-shared*) while [ "$1" != -o ]; do shift; done; exec gcc -shared -o "$2" -x c /dev/null ;;
  *-c\\ *) while [ "$1" != -o ]; do shift; done; : > "$2" ;;
  *) exec gcc "$@" ;;
esac
"""


def report(capsys):
    code = doctor.main([])
    return code, capsys.readouterr().out


def test_a_healthy_environment(capsys):
    code, text = report(capsys)
    assert code == 0 and 'Nothing is wrong.' in text and '->' not in text
    for name in (
        *doctor.NEEDED,
        'opencv',
        'mmcv ops',
        'torch + mmcv',
        'device',
        'DTN in C++',
        'DTN in Triton',
        'tensorboard',
    ):
        assert f'\nok     {name} ' in text or f'ok     {name} ' in text


def test_what_is_missing_is_named_with_the_cure(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, 'mmdet', None)  # installed, but cannot be imported
    code, text = report(capsys)
    assert code == 1 and '1 of ' in text
    assert 'pip install --no-build-isolation onedl-mmdetection --force-reinstall' in text
    monkeypatch.setattr(doctor.metadata, 'packages_distributions', dict)
    assert '-> pip install --no-build-isolation onedl-mmdetection\n' in report(capsys)[1]


def test_mmcv_without_its_ops(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, 'mmcv.ops', None)
    code, text = report(capsys)
    assert code == 1 and 'wrong  mmcv ops' in text and 'MMCV_WITH_OPS=1' in text


def test_the_cpp_kernels_are_there():
    """CI fails without the C++ kernels. The reference would pass every other test."""
    assert dtn_cpu.works()


def test_the_cpp_kernels_are_built_where_they_are_missing(capsys, monkeypatch, tmp_path):
    """The compiler in this test writes an empty library.

    The real one takes 10 seconds, and test_dtn_cpu.py runs it.
    """
    built = tmp_path / 'extensions'
    compiler = tmp_path / 'c++'
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv('TORCH_EXTENSIONS_DIR', str(built))
    monkeypatch.setenv('CXX', str(compiler))
    code, text = report(capsys)
    assert built.exists() and len(list(built.iterdir())) == 1, text
    (library,) = built.iterdir()
    assert code == 0 and re.search(rf'ok     DTN in C\+\+ +{library}\n', text)


def test_cpp_kernels_that_cannot_be_built(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv('TORCH_EXTENSIONS_DIR', str(tmp_path))
    monkeypatch.setenv('CXX', '/bin/false')
    code, text = report(capsys)
    assert code == 1 and 'wrong  DTN in C++' in text and 'apt-get install g++' in text
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)  # GPUs do not need C++
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 0)
    assert 'ok     DTN in C++' in report(capsys)[1]


@pytest.mark.parametrize(
    ('found', 'expected'),
    [
        (None, 'gives the same numbers as plain torch'),
        ('output differs by 3', 'GPU 0, so plain torch runs: output diff'),
    ],
)
def test_triton_on_a_gpu_is_checked(capsys, monkeypatch, found, expected):
    checked = []
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda i: 'a GPU')
    monkeypatch.setattr(triton_check, 'check', lambda device, cases: checked.append(device) or found)
    code, text = report(capsys)
    assert code == 1 and checked == [torch.device('cuda', 0)], 'mmcv has no CUDA here'
    assert expected in text and ('wrong  DTN in Triton' in text) == bool(found)
    monkeypatch.setitem(sys.modules, 'triton', None)
    assert '-> pip install triton' in report(capsys)[1]


def test_a_back_end_that_is_switched_off(capsys, monkeypatch):
    monkeypatch.setenv('MMDTN_BACKEND', 'reference')
    code, text = report(capsys)
    assert code == 1 and 'wrong  MMDTN_BACKEND' in text


@pytest.mark.parametrize(
    ('wheels', 'importable', 'expected'),
    [
        ([], False, '-> pip install opencv-python-headless, or opencv-python'),
        (['opencv-python'], False, '-> pip uninstall opencv-python, then pip install opencv-python-headless'),
        (['opencv-python', 'opencv-python-headless'], True, None),
    ],
)
def test_opencv(capsys, monkeypatch, wheels, importable, expected):
    everything = dict(doctor.metadata.packages_distributions(), cv2=wheels)
    monkeypatch.setattr(doctor.metadata, 'packages_distributions', lambda: everything)
    if not importable:
        monkeypatch.setitem(sys.modules, 'cv2', None)
    code, text = report(capsys)
    assert code == (expected is not None) and (expected or 'Nothing is wrong.') in text


def test_mmcv_compiled_for_another_torch(capsys, monkeypatch):
    import mmcv.ops
    import torch

    def undefined(*args):
        raise RuntimeError('nms_impl: implementation for device cpu not found.')

    with monkeypatch.context() as patch:
        patch.setattr(mmcv.ops, 'nms', undefined)
        code, text = report(capsys)
    assert code == 1 and 'wrong  torch + mmcv' in text and 'nms_impl' in text and '--force-reinstall' in text
    monkeypatch.setattr(torch.version, 'cuda', '12.4')
    monkeypatch.setattr(mmcv.ops, 'get_compiling_cuda_version', lambda: '11.8')
    assert 'torch for CUDA 12.4, mmcv compiled with CUDA 11.8' in report(capsys)[1]


@pytest.mark.slow
def test_it_runs_where_the_package_cannot_be_imported():
    block = 'import sys, runpy; sys.modules["mmengine"] = None; '
    run = 'runpy.run_module("mmdtn.doctor", run_name="__main__")'
    done = subprocess.run([sys.executable, '-c', block + run], capture_output=True, text=True, cwd=REPO)
    assert done.returncode == 1 and 'wrong  mmengine' in done.stdout and 'Traceback' not in done.stderr


@pytest.mark.parametrize(
    ('distribution', 'version', 'wrong'),
    [('mmdet', '3.3.0', False), ('onedl-mmdetection', '3.5.1', False), ('mmdet', '2.28.2', True)],
)
def test_openmmlabs_and_onedls_packages_go_by_their_versions(capsys, monkeypatch, distribution, version, wrong):
    import mmdet

    monkeypatch.setattr(mmdet, '__version__', version)
    whose = dict(doctor.metadata.packages_distributions(), mmdet=[distribution])
    monkeypatch.setattr(doctor.metadata, 'packages_distributions', lambda: whose)
    real = doctor.metadata.version
    monkeypatch.setattr(doctor.metadata, 'version', lambda name: version if name == distribution else real(name))
    code, text = report(capsys)
    assert code == wrong and f'{version}' in text
    assert ('it should be 3.0 or newer' in text) == wrong
