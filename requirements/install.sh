#!/usr/bin/env bash
# Installs the environment of mmdtn for the given Python, and prints a line for each step:
#   requirements/install.sh .venv/bin/python
# The order of the steps matters. Running the script again only checks what is already installed.
set -u
python=$1
cd "$(dirname "$0")/.." || exit 1
log=$(mktemp -t mmdtn-install.XXXXXX.log)
started=$SECONDS

# step NAME HINT COMMAND... runs COMMAND, and shows the last line of its output every 30 s.
# If COMMAND fails, the end of its output and HINT are shown.
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
    echo "FAILED: $name (full output: $log)"
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
step "build tools" "check the network connection to the package index" \
  pip -r requirements/build.txt
step "torch (about 2 minutes)" "check the network, and that 6 GB of disk space are free" \
  pip -r requirements/torch.txt
step "mmengine" "check the network" \
  pip -c $mm onedl-mmengine
if "$python" -c 'import mmcv.ops' 2>/dev/null; then
  echo "==> mmcv is already installed with its ops"
else
  step "mmcv (compiles its C++ ops, which takes 2 minutes on 2 cores; pip keeps the wheel)" \
    "mmcv needs a C++17 compiler (Debian: apt-get install g++ python3-dev); for GPUs there are built wheels, see README" \
    requirements/mmcv.sh "$python"
fi
step "check of mmcv's ops" \
  "compile mmcv again: $python -m pip uninstall -y onedl-mmcv; $python -m pip cache remove onedl_mmcv; requirements/mmcv.sh $python" \
  "$python" requirements/check_mmcv.py
step "mmdet, mmpretrain" "check the network" \
  pip --no-build-isolation -c $mm onedl-mmdetection onedl-mmpretrain
step "timm, pycocotools, ONNX, test tools" "check the network" \
  pip -r requirements/runtime.txt -r requirements/export.txt -r requirements/tests.txt
step "mmdtn itself, editable" "run this step again with: $python -m pip install --no-build-isolation -e ." \
  pip --no-build-isolation --no-deps -e .
step "DTN's C++ (10 to 20 seconds)" "install a C++20 compiler (Debian: apt-get install g++); $python -m mmdtn.doctor tells more" \
  "$python" -c 'from mmdtn.ops import dtn_cpu; dtn_cpu.build()'
rm -f "$log"
echo "==> the environment is ready after $(( (SECONDS - started) / 60 )) min $(( (SECONDS - started) % 60 )) s"
