#!/bin/bash
# Supervised training of an 8B model on one node.
# sbatch slurm/sft.sh [KNOB=VALUE ...]     Knobs: configs/experiment/sft_8b.yaml. Steps: slurm/job.sh. Site: slurm/env.sh.
#SBATCH --job-name=sft_8b
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
train +experiment=sft_8b "$@"
