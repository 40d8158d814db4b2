#!/usr/bin/env bash
# Tests in a slurm job:
#   GPUS=8 GPUS_PER_NODE=8 CPUS_PER_TASK=5 SRUN_ARGS='--time=1:00:00' \
#     tools/slurm_test.sh PARTITION JOB_NAME CONFIG CHECKPOINT [options of tools/test.py]
# On machines without GPUs, set GPUS_PER_NODE=0 TASKS_PER_NODE=4.
set -euo pipefail
[ $# -ge 4 ] || { echo "usage: $0 PARTITION JOB_NAME CONFIG CHECKPOINT [options of tools/test.py]" >&2; exit 2; }
. "$(dirname "${BASH_SOURCE[0]}")/launchers.sh"
with_slurm "$1" "$2" test.py "$3" "$4" --launcher slurm "${@:5}"
