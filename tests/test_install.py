"""requirements/mmcv.sh builds mmcv with optimisation flags and with a precompiled header that the compiler accepts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).parents[1] / 'requirements'

EXTENSION = """
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

flags = {'cxx': ['-std=c++17']}  # as mmcv's setup.py
extension = CppExtension('small', ['small.cpp'], extra_compile_args=flags)
setup(name='small', ext_modules=[extension], cmdclass={'build_ext': BuildExtension})
"""


@pytest.fixture
def python(tmp_path):
    """Replaces Python by a script that builds a small extension instead of mmcv. Unused headers are errors."""
    (tmp_path / 'setup.py').write_text(EXTENSION)
    (tmp_path / 'small.cpp').write_text('int twice(int x) { return 2 * x; }\n')
    script = tmp_path / 'python'
    script.write_text(f"""#!/bin/bash
[ "$1" != -m ] && exec {sys.executable} "$@"
echo "$CFLAGS" >>{tmp_path}/flags
cd {tmp_path} && CFLAGS="$CFLAGS -Werror=invalid-pch" {sys.executable} setup.py build_ext
""")
    script.chmod(0o755)
    return script


def install(python, **environment):
    done = subprocess.run(
        ['bash', REQUIREMENTS / 'mmcv.sh', python],
        env=os.environ | {'TMPDIR': str(python.parent)} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    builds = [line.split() for line in (python.parent / 'flags').read_text().splitlines()]
    assert not list(python.parent.glob('mmdtn-mmcv.*')), 'the header, of 400 MB, is deleted'
    return builds, done.stdout


@pytest.mark.slow
def test_mmcv_is_built_optimised_and_with_the_precompiled_header(python):
    builds, _ = install(python)
    (flags,) = builds  # a header that the build cannot use would cause a second build
    assert flags[0] == '-O2' and '-g0' in flags and '-include' in flags


@pytest.mark.slow
def test_a_compiler_without_precompiled_headers_builds_as_well(python, tmp_path):
    compiler = tmp_path / 'c++'
    compiler.write_text('#!/bin/bash\ncase "$*" in *c++-header*) exit 1 ;; esac\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    builds, said = install(python, CXX=str(compiler))
    (flags,) = builds
    assert flags[0] == '-O2' and '-include' not in flags and 'Without a precompiled header' in said


@pytest.mark.parametrize(('calls', 'code'), [(1, 0), (4, 1)])
def test_the_check_finds_ops_that_are_slow(tmp_path, calls, code):
    ops = tmp_path / 'mmcv' / 'ops.py'
    ops.parent.mkdir()
    (ops.parent / '__init__.py').touch()
    ops.write_text(f'import torchvision\ndef nms(*a):\n    for _ in range({calls}): torchvision.ops.nms(*a)\n')
    done = subprocess.run(
        [sys.executable, REQUIREMENTS / 'check_mmcv.py'],
        env=os.environ | {'PYTHONPATH': str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, 'without optimisation' in done.stderr) == (code, bool(code))
