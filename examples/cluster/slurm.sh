#!/bin/bash
# Train on several nodes of a SLURM cluster. Submit it with: sbatch examples/cluster/slurm.sh
# One task per node starts Ray. The learner runs on the first node.
#SBATCH --job-name=sb3-distributed
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem-per-cpu=2G
#SBATCH --time=24:00:00

set -euo pipefail
source .venv/bin/activate # must be on a file system that all nodes share

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{ print $1 }')
# Jobs of other users may share a node, so each job needs its own port and folder. Ports 10002 to 19999 belong to Ray's
# workers.
port=$((20000 + SLURM_JOB_ID % 10000))
folder=/tmp/ray-$SLURM_JOB_ID
cpus=$SLURM_CPUS_PER_TASK
# The token keeps other users out: srun passes it in the environment to the processes of this job only.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN
trap 'kill $(jobs -p) 2>/dev/null' EXIT

srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
    ray start --head --node-ip-address="$address" --port="$port" --num-cpus="$cpus" --temp-dir="$folder" \
    --include-dashboard=false --block &
until ray status --address "$address:$port" >/dev/null 2>&1; do
    kill -0 $! # ends the job if Ray could not start
    sleep 2
done
for node in "${nodes[@]:1}"; do
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" \
        ray start --address="$address:$port" --num-cpus="$cpus" --block &
done

# Each collector takes one CPU. Two CPUs are left for the learner.
collectors=$((SLURM_JOB_NUM_NODES * cpus - 2))
python examples/example_train_distributed.py --address "$address:$port" --collectors "$collectors" --steps 50000000
