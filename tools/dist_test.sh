#!/usr/bin/env bash
# Tests in several processes, one a GPU; without a GPU they talk through gloo:
#   tools/dist_test.sh CONFIG CHECKPOINT PROCESSES [options of tools/test.py]
# On several machines, on each: NNODES=2 NODE_RANK=0 MASTER_ADDR=first.machine PORT=29500 tools/dist_test.sh ...
set -euo pipefail
[ $# -ge 3 ] || { echo "usage: $0 CONFIG CHECKPOINT PROCESSES [options of tools/test.py]" >&2; exit 2; }
config=$1 checkpoint=$2 processes=$3
shift 3
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python}" -m torch.distributed.run \
  --nnodes="${NNODES:-1}" --node_rank="${NODE_RANK:-0}" --master_addr="${MASTER_ADDR:-127.0.0.1}" \
  --master_port="${PORT:-29500}" --nproc_per_node="$processes" \
  "$here/test.py" "$config" "$checkpoint" --launcher pytorch "$@"
