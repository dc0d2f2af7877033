#!/bin/bash
# Runs a trainer rank as a Slurm task, with the variables that torch reads.
set -euo pipefail
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
exec "$@"
