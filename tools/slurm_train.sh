#!/usr/bin/env bash
# Trains in a slurm job:
#   GPUS=16 GPUS_PER_NODE=8 CPUS_PER_TASK=5 SRUN_ARGS='--time=24:00:00' \
#     tools/slurm_train.sh PARTITION JOB_NAME CONFIG WORK_DIR [options of tools/train.py]
# On machines without GPUs, set GPUS_PER_NODE=0 TASKS_PER_NODE=4.
set -euo pipefail
[ $# -ge 4 ] || { echo "usage: $0 PARTITION JOB_NAME CONFIG WORK_DIR [options of tools/train.py]" >&2; exit 2; }
. "$(dirname "${BASH_SOURCE[0]}")/launchers.sh"
with_slurm "$1" "$2" train.py "$3" --work-dir "$4" --launcher slurm "${@:5}"
