#!/bin/bash
# Train on several nodes of a SLURM cluster: sbatch examples/cluster/slurm.sh
# One task per node starts Ray. The learner runs on the first node.
#SBATCH --job-name=sb3-distributed
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem-per-cpu=2G
#SBATCH --time=24:00:00

set -euo pipefail
source .venv/bin/activate # on a file system that all nodes share

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{ print $1 }')
# Jobs of several users may share a node, so every job has a port and a folder of its own. Ray's workers have ports
# from 10002 to 19999.
port=$((20000 + SLURM_JOB_ID % 10000))
folder=/tmp/ray-$SLURM_JOB_ID
cpus=$SLURM_CPUS_PER_TASK
# Only processes of this job know the token. srun passes the environment on.
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

# A collector takes a CPU. Two of the first node's are left to the learner.
collectors=$((SLURM_JOB_NUM_NODES * cpus - 2))
python examples/example_train_distributed.py --address "$address:$port" --collectors "$collectors" --steps 50000000
