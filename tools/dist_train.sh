#!/usr/bin/env bash
# Trains in several processes, one for each GPU. Without GPUs they communicate through gloo.
#   tools/dist_train.sh CONFIG PROCESSES [options of tools/train.py]
# To use several machines, run this on each of them:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=first.machine PORT=29500 tools/dist_train.sh ...
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: $0 CONFIG PROCESSES [options of tools/train.py]" >&2; exit 2; }
. "$(dirname "${BASH_SOURCE[0]}")/launchers.sh"
with_torchrun "$2" train.py "$1" --launcher pytorch "${@:3}"
