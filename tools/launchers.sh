# Functions that start a tool in several processes. The other scripts in this folder source them.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}"

# with_torchrun PROCESSES TOOL [arguments of the tool]
# For several machines, set NNODES, NODE_RANK, MASTER_ADDR and PORT.
with_torchrun() {
  exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes="${NNODES:-1}" --node_rank="${NODE_RANK:-0}" --master_addr="${MASTER_ADDR:-127.0.0.1}" \
    --master_port="${PORT:-29500}" --nproc_per_node="$1" "$here/$2" "${@:3}"
}

# with_slurm PARTITION JOB_NAME TOOL [arguments of the tool]
# slurm sets addresses and ranks.
with_slurm() {
  local gpus_per_node=${GPUS_PER_NODE:-8} gres=()
  [ "$gpus_per_node" -eq 0 ] || gres=("--gres=gpu:$gpus_per_node")
  # shellcheck disable=SC2086  # SRUN_ARGS is a list of options
  exec srun -p "$1" --job-name="$2" "${gres[@]}" \
    --ntasks="${GPUS:-8}" --ntasks-per-node="${TASKS_PER_NODE:-$gpus_per_node}" \
    --cpus-per-task="${CPUS_PER_TASK:-5}" --kill-on-bad-exit=1 ${SRUN_ARGS:-} \
    "${PYTHON:-python}" -u "$here/$3" "${@:4}"
}
