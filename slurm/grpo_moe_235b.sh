#!/bin/bash
# GRPO of Qwen3-235B-A22B: trainers on 10 nodes, a server of 8 GPUs on each of 14 more.
# sbatch slurm/grpo_moe_235b.sh [KNOB=VALUE ...]     Knobs: configs/experiment/grpo_moe_235b.yaml. Steps: slurm/job.sh. Site: slurm/env.sh.
#SBATCH --job-name=grpo_moe_235b
#SBATCH --nodes=24
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x_%j.out
# shellcheck source=slurm/job.sh
source "${MEGARL_HOME:-$SLURM_SUBMIT_DIR}/slurm/job.sh" || exit
train +experiment=grpo_moe_235b "$@"
