#!/bin/bash
# GRPO of a 7B model on one node: 6 GPUs train, 2 serve.
# sbatch slurm/grpo_7b.sh [KNOB=VALUE ...]     Knobs: configs/experiment/grpo_7b.yaml. Steps: slurm/job.sh. Site: slurm/env.sh.
#SBATCH --job-name=grpo_7b
#SBATCH --nodes=1
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
train +experiment=grpo_7b "$@"
