#!/usr/bin/env bash
# Tests in several processes, one for each GPU. Without GPUs they communicate through gloo.
#   tools/dist_test.sh CONFIG CHECKPOINT PROCESSES [options of tools/test.py]
# To use several machines, run this on each of them:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=first.machine PORT=29500 tools/dist_test.sh ...
set -euo pipefail
[ $# -ge 3 ] || { echo "usage: $0 CONFIG CHECKPOINT PROCESSES [options of tools/test.py]" >&2; exit 2; }
. "$(dirname "${BASH_SOURCE[0]}")/launchers.sh"
with_torchrun "$3" test.py "$1" "$2" --launcher pytorch "${@:4}"
