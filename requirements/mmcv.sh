#!/usr/bin/env bash
# Compiles mmcv with its C++ ops and installs it: requirements/mmcv.sh PYTHON
# On a GPU machine with CUDA's compiler: FORCE_CUDA=1 requirements/mmcv.sh PYTHON
#
# Python's own compiler flags contain -g, and 78 files include torch's headers. Without debug symbols, and with torch's
# headers precompiled once, the build takes a fifth of the time.
set -u
python=$1
install=("$python" -m pip --disable-pip-version-check install -v --no-build-isolation -c "$(dirname "$0")/mm.txt" onedl-mmcv)

# CFLAGS replaces the flags that Python was built with, so -O2 has to be among them.
export CFLAGS="-O2 -g0 -fwrapv -DNDEBUG ${CFLAGS-}"
export MMCV_WITH_OPS=1

# The compiler uses a precompiled header only if it was made with the flags of the build, and ignores it otherwise. The
# compiler and the include folders are torch's, CCSHARED is what setuptools adds to CFLAGS, and mmcv's setup.py wants C++17.
compile=$("$python" -c '
import os, sysconfig
from torch.utils.cpp_extension import get_cxx_compiler, include_paths

shared = sysconfig.get_config_var("CCSHARED") or ""
print(get_cxx_compiler(), os.environ["CFLAGS"], shared, "-std=c++17", *("-I" + path for path in include_paths()))
') || exit 1
folder=$(mktemp -d -t mmdtn-mmcv.XXXXXX) || exit 1
trap 'rm -rf "$folder"' EXIT
header="-include $folder/torch.h -Winvalid-pch"
echo '#include <torch/types.h>' >"$folder/torch.h"
if $compile -x c++-header "$folder/torch.h" -o "$folder/torch.h.gch" &&
  echo | $compile $header -Werror -fsyntax-only -x c++ -; then
  CFLAGS="$CFLAGS $header" "${install[@]}" && exit
fi
echo 'Without a precompiled header, which takes several times as long:'
"${install[@]}"
