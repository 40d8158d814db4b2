#!/usr/bin/env bash
# Trains in several processes, one a GPU; without a GPU they talk through gloo:
#   tools/dist_train.sh CONFIG PROCESSES [options of tools/train.py]
# On several machines, on each: NNODES=2 NODE_RANK=0 MASTER_ADDR=first.machine PORT=29500 tools/dist_train.sh ...
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: $0 CONFIG PROCESSES [options of tools/train.py]" >&2; exit 2; }
config=$1 processes=$2
shift 2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python}" -m torch.distributed.run \
  --nnodes="${NNODES:-1}" --node_rank="${NODE_RANK:-0}" --master_addr="${MASTER_ADDR:-127.0.0.1}" \
  --master_port="${PORT:-29500}" --nproc_per_node="$processes" \
  "$here/train.py" "$config" --launcher pytorch "$@"
