#!/usr/bin/env bash
# Tests as a slurm job; addresses and ranks are slurm's own:
#   GPUS=8 GPUS_PER_NODE=8 CPUS_PER_TASK=5 SRUN_ARGS='--time=1:00:00' \
#     tools/slurm_test.sh PARTITION JOB_NAME CONFIG CHECKPOINT [options of tools/test.py]
# GPUS_PER_NODE=0 TASKS_PER_NODE=4 runs on machines without GPUs.
set -euo pipefail
[ $# -ge 4 ] || { echo "usage: $0 PARTITION JOB_NAME CONFIG CHECKPOINT [options of tools/test.py]" >&2; exit 2; }
partition=$1 job=$2 config=$3 checkpoint=$4
shift 4
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
gpus_per_node=${GPUS_PER_NODE:-8}
gres=()
[ "$gpus_per_node" -eq 0 ] || gres=("--gres=gpu:$gpus_per_node")
# shellcheck disable=SC2086  # SRUN_ARGS is a list of options
PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}" exec srun -p "$partition" --job-name="$job" "${gres[@]}" \
  --ntasks="${GPUS:-8}" --ntasks-per-node="${TASKS_PER_NODE:-$gpus_per_node}" \
  --cpus-per-task="${CPUS_PER_TASK:-5}" --kill-on-bad-exit=1 ${SRUN_ARGS:-} \
  "${PYTHON:-python}" -u "$here/test.py" "$config" "$checkpoint" --launcher slurm "$@"
