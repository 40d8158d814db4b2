"""Checks the environment, and tells how to fix what is wrong.

The doctor also builds DTN's C++ code, which takes 10 to 20 seconds the first time. On a GPU, it checks the Triton
kernels with all dtypes and measures their speed, which takes a few minutes.

Example:
    python -m mmdtn.doctor --report FILE
"""

import argparse
import ctypes
import functools
import importlib
import itertools
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from mmdtn.errors import first_line

OPENMMLAB = dict(mmengine='onedl-mmengine', mmcv='onedl-mmcv', mmdet='onedl-mmdetection', mmpretrain='onedl-mmpretrain')
# Import names and oldest supported versions. The packages of onedl continue OpenMMLab's version numbers, so both have
# the same bounds.
NEEDED = dict(
    torch='2.7',  # the first version whose Triton supports named tuples as kernel arguments
    torchvision='0.22',
    mmengine='0.10',
    mmcv='2.0',
    mmdet='3.0',
    mmpretrain='1.0',
    timm='1.0.11',
    pycocotools='2.0',
)


class Finding(NamedTuple):
    """One check of the report. ``mend`` tells how to fix a problem and is empty if there is none."""

    what: str
    found: str
    mend: str = ''


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """Returns the installed distributions by import name.

    The result is cached, because a lookup takes a tenth of a second.
    """
    return metadata.packages_distributions()


def examine() -> Iterator[Finding]:
    _distributions.cache_clear()
    yield Finding(
        'python', platform.python_version(), '' if sys.version_info >= (3, 10) else 'use Python 3.10 or newer'
    )
    for name, oldest in NEEDED.items():
        yield _package(name, oldest)
    yield _opencv()
    yield _mmcv_ops()
    yield _torch_and_mmcv()
    yield _device()
    yield _kernels_for_cpus()
    yield _kernels_for_gpus()
    yield from _switched_off()
    yield _tensorboard()


def _package(name: str, oldest: str) -> Finding:
    install = f'pip install --no-build-isolation {OPENMMLAB[name]}' if name in OPENMMLAB else f'pip install {name}'
    module, error = _import(name)
    if module is None:
        return Finding(name, error, install if _is_absent(name) else f'reinstall it: {install} --force-reinstall')
    distribution, version = _version(name, module)
    if _numbers(version) < _numbers(oldest):
        return Finding(name, f'{version} ({distribution})', f'it should be {oldest} or newer: {install} --upgrade')
    return Finding(name, version if distribution == name else f'{version} ({distribution})')


def _import(name: str) -> tuple[ModuleType | None, str]:
    try:
        return importlib.import_module(name), ''
    except Exception as error:  # broken builds raise various exceptions
        return None, f'cannot be imported: {first_line(error)}'


def _is_absent(name: str) -> bool:
    return name not in _distributions()


def _version(name: str, module: ModuleType) -> tuple[str, str]:
    """Returns the name and version of the distribution. Distribution names may differ from import names."""
    candidates = _distributions().get(name, [])
    for distribution in sorted(set(candidates), key=lambda d: not d.startswith('onedl')):
        return distribution, metadata.version(distribution)
    return name, getattr(module, '__version__', '0')


def _numbers(version: str) -> tuple[int, ...]:
    """Converts ``'2.12.1+cu130'`` to ``(2, 12, 1)``."""
    return tuple(int(part) for part in version.partition('+')[0].split('.')[:3] if part.isdigit())


def _opencv() -> Finding:
    """Checks OpenCV. MMEngine imports cv2 but does not require it, and other packages install one or more versions."""
    wheels = sorted(set(_distributions().get('cv2', [])))
    headless = 'pip install opencv-python-headless'
    module, error = _import('cv2')
    if module is None and wheels:  # machines without a display usually lack libGL.so.1
        return Finding('opencv', error, f'pip uninstall {" ".join(wheels)}, then {headless}, which needs no display')
    if module is None:
        return Finding('opencv', error, f'{headless}, or opencv-python to open windows, but not both')
    return Finding('opencv', f'{module.__version__} ({", ".join(wheels)})')


def _torch_and_mmcv() -> Finding:
    """Checks that mmcv's ops run. Ops are compiled for one version of torch and CUDA, and fail with all others."""
    again = 'reinstall mmcv for this torch: pip install --no-build-isolation --force-reinstall --no-deps onedl-mmcv'
    torch, _ = _import('torch')
    ops, error = _import('mmcv.ops')
    if torch is None or ops is None:
        return Finding('torch + mmcv', error or 'torch cannot be imported', again)
    ours, theirs = torch.version.cuda, ops.get_compiling_cuda_version()
    if ours and theirs[:1].isdigit() and _numbers(ours)[0] != _numbers(theirs)[0]:
        return Finding('torch + mmcv', f'torch for CUDA {ours}, mmcv compiled with CUDA {theirs}', again)
    device = 'cuda' if torch.cuda.is_available() and theirs[:1].isdigit() else 'cpu'
    boxes = torch.tensor([[0.0, 0, 4, 4], [0, 0, 4, 5], [9, 9, 12, 12]], device=device)
    try:
        _, kept = ops.nms(boxes, torch.tensor([0.5, 0.9, 0.7], device=device), 0.5)
    except Exception as error:  # wrong binaries raise various exceptions
        return Finding('torch + mmcv', f'mmcv.ops.nms fails: {first_line(error)}', again)
    right = kept.tolist() == [1, 2]
    return Finding('torch + mmcv', f'mmcv.ops.nms on {device} gives {kept.tolist()}', '' if right else again)


def _mmcv_ops() -> Finding:
    module, error = _import('mmcv.ops')
    if module is None:
        again = 'MMCV_WITH_OPS=1 pip install --no-build-isolation --force-reinstall onedl-mmcv'
        return Finding('mmcv ops', error, f'compile mmcv with its ops: {again}')
    from mmcv.ops import get_compiler_version, get_compiling_cuda_version

    return Finding('mmcv ops', f'{get_compiler_version()}, CUDA {get_compiling_cuda_version()}')


def _device() -> Finding:
    torch, error = _import('torch')
    if torch is None:
        return Finding('device', error, 'install torch first')
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        mend = ''
        ops, _ = _import('mmcv.ops')
        if ops is not None and ops.get_compiling_cuda_version() == 'not available':
            mend = 'mmcv was compiled without CUDA: reinstall it on this machine with FORCE_CUDA=1'
        return Finding('device', f'{", ".join(names)}, CUDA {torch.version.cuda}', mend)
    if shutil.which('nvidia-smi'):
        return Finding(
            'device', 'CPU, although there is an NVIDIA driver', "install a torch that is built for the driver's CUDA"
        )
    return Finding(
        'device', f'CPU, {torch.get_num_threads()} threads; mixed precision in bfloat16, processes over gloo'
    )


def _kernels_for_cpus() -> Finding:
    """Builds DTN's C++ code if it is missing.

    Without the C++ code, DTN runs in plain torch on CPUs, which does not matter on machines with a GPU.
    """
    torch, _ = _import('torch')
    dtn_cpu, error = _import('mmdtn.ops.dtn_cpu')
    if torch is None or dtn_cpu is None:
        return Finding('DTN in C++', error, 'fix torch and mmengine first')
    try:
        library = dtn_cpu.build()
        ctypes.CDLL(str(library))
    except Exception as error:  # the compiler, ninja, setuptools and the file system raise different errors
        found = f'none, DTN runs in plain torch on CPUs: {first_line(error)}'
        if torch.cuda.is_available() or platform.system() == 'Windows':
            return Finding('DTN in C++', found)
        see = 'python -c "from mmdtn.ops import dtn_cpu; dtn_cpu.build()" shows the output of the compiler'
        return Finding('DTN in C++', found, f'install a C++ compiler (Debian: apt-get install g++) and ninja; {see}')
    return Finding('DTN in C++', str(library))


def _kernels_for_gpus() -> Finding:
    torch, _ = _import('torch')
    triton, error = _import('triton')
    version = f'triton {_version("triton", triton)[1]}' if triton else 'no triton'
    if torch is None or not torch.cuda.is_available():
        return Finding('DTN in Triton', f'{version}; no GPU to run on')
    if triton is None:
        mend = 'pip install triton' if platform.system() == 'Linux' else ''
        return Finding('DTN in Triton', f'none, DTN runs in plain torch on GPUs: triton {error}', mend)
    triton_check, error = _import('mmdtn.ops.triton_check')
    if triton_check is None:
        return Finding('DTN in Triton', error, 'fix mmengine first')
    for i in range(torch.cuda.device_count()):
        if wrong := triton_check.check(torch.device('cuda', i), triton_check.LONG):
            report = 'results are correct but slower. Please report this line with the GPU and the versions above'
            return Finding(
                'DTN in Triton', f'{version} fails its check on GPU {i}, so plain torch runs: {wrong}', report
            )
    return Finding('DTN in Triton', f'{version} gives the same numbers as plain torch')


def _switched_off() -> Iterator[Finding]:
    if os.environ.get('MMDTN_BACKEND') == 'reference':
        yield Finding(
            'MMDTN_BACKEND', 'reference: DTN runs in plain torch everywhere', 'unset it unless you are debugging'
        )


def _tensorboard() -> Finding:
    module, _ = _import('tensorboard')
    return Finding(
        'tensorboard', _version('tensorboard', module)[1] if module else 'none: no TensorBoard logs are written'
    )


def _lines() -> Iterator[tuple[str, bool]]:
    """Yields each line of the report and whether it reports a problem."""
    findings = list(examine())
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        yield f'{"wrong" if finding.mend else "ok   "}  {finding.what:<{width}}  {finding.found}', bool(finding.mend)
        if finding.mend:
            yield f'       {"":<{width}}  -> {finding.mend}', False
    wrong = sum(bool(finding.mend) for finding in findings)
    yield 'Nothing is wrong.' if not wrong else f'{wrong} of {len(findings)} checks failed.', False


def _measurements() -> Iterator[str]:
    """Measures the kernels on each GPU."""
    torch, _ = _import('torch')
    if torch is None or not torch.cuda.is_available():
        return
    gpu_report, error = _import('mmdtn.benchmarks.gpu_report')
    if gpu_report is None:
        yield f'No measurements: {error}'
        return
    for i in range(torch.cuda.device_count()):
        yield f'\nGPU {i}: {torch.cuda.get_device_name(i)}'
        try:
            with torch.cuda.device(i):
                yield from gpu_report.report(torch.device('cuda', i))
        except Exception as error:  # earlier lines are still useful
            yield f'The measurement stopped: {type(error).__name__}: {error}'


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--report', type=Path, help='also write the output to this file, for an issue on GitHub')
    args = parser.parse_args(arguments)
    said, wrong = [], False
    for line, is_wrong in itertools.chain(_lines(), ((line, False) for line in _measurements())):
        print(line, flush=True)
        said.append(line)
        wrong |= is_wrong
    if args.report:
        args.report.write_text('\n'.join(said) + '\n')
        print(f'This report is in {args.report}.')
    return int(wrong)


if __name__ == '__main__':
    sys.exit(main())
