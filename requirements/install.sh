#!/usr/bin/env bash
# Installs mmdtn's whole environment with the given Python, in the one order that works, one line for each step:
#   requirements/install.sh .venv/bin/python
# Every step is repeatable: what is there already is only checked.
set -u
python=$1
cd "$(dirname "$0")/.." || exit 1
log=$(mktemp -t mmdtn-install.XXXXXX.log)
started=$SECONDS

# step NAME HINT COMMAND...: runs COMMAND quietly; while it runs, shows every 30 s that it is alive;
# if it fails, shows the end of its output and what to do.
step() {
  local name=$1 hint=$2 begin=$SECONDS
  shift 2
  echo "==> $name"
  "$@" >"$log" 2>&1 &
  local pid=$!
  while kill -0 "$pid" 2>/dev/null; do
    sleep 1
    if (( (SECONDS - begin) % 30 == 29 )); then
      echo "    ... $(( (SECONDS - begin + 1) / 60 )) min $(( (SECONDS - begin + 1) % 60 )) s: $(tail -n 1 "$log" | cut -c1-100)"
      sleep 1
    fi
  done
  if ! wait "$pid"; then
    tail -n 30 "$log"
    echo "FAILED: $name (the whole output: $log)"
    echo "What to do: $hint"
    exit 1
  fi
}
pip() { "$python" -m pip --disable-pip-version-check install "$@"; }

"$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || {
  echo "FAILED: mmdtn needs Python 3.10 to 3.13, but $python is $("$python" -V 2>&1)"
  echo "What to do: make <target> PYTHON=/path/to/python3.11"
  exit 1
}
export MAX_JOBS=${MAX_JOBS:-$(nproc 2>/dev/null || echo 2)}
mm=requirements/mm.txt
step "build tools" "check that a package index can be reached" \
  pip -r requirements/build.txt
step "torch (about 2 minutes)" "check the network and that 6 GB of disk are free" \
  pip -r requirements/torch.txt
step "mmengine" "check the network" \
  pip -c $mm onedl-mmengine
if "$python" -c 'import mmcv.ops' 2>/dev/null; then
  echo "==> mmcv: already there, with its ops"
else
  step "mmcv (compiles its C++ ops: 2 minutes on 2 cores, once: pip keeps the wheel)" \
    "mmcv needs a C++17 compiler (Debian: apt-get install g++ python3-dev); on a GPU machine a built wheel may fit, see README" \
    requirements/mmcv.sh "$python"
fi
step "check of mmcv's ops" \
  "compile them again: $python -m pip uninstall -y onedl-mmcv; $python -m pip cache remove onedl_mmcv; requirements/mmcv.sh $python" \
  "$python" requirements/check_mmcv.py
step "mmdet, mmpretrain" "check the network" \
  pip --no-build-isolation -c $mm onedl-mmdetection onedl-mmpretrain
step "timm, pycocotools, ONNX, test tools" "check the network" \
  pip -r requirements/runtime.txt -r requirements/export.txt -r requirements/tests.txt
step "mmdtn itself, editable" "run it again with: $python -m pip install --no-build-isolation -e ." \
  pip --no-build-isolation --no-deps -e .
step "DTN's C++ (10 to 20 seconds)" "it needs a compiler of C++20 (Debian: apt-get install g++); $python -m mmdtn.doctor tells more" \
  "$python" -c 'from mmdtn.ops import dtn_cpu; dtn_cpu.build()'
rm -f "$log"
echo "==> environment ready after $(( (SECONDS - started) / 60 )) min $(( (SECONDS - started) % 60 )) s"
