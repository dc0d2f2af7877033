#!/bin/bash
# A trainer rank as a Slurm task: gives it the names that torch knows, and becomes the command.
set -euo pipefail
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
exec "$@"
