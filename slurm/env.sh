#!/bin/bash
# Settings of the cluster, sourced by every script here on every node. Edit them, or set the variables before sbatch,
# which passes them on. Hyperparameters are in configs/experiment/.

# --- the environment: a module, a virtual environment, or nothing with a container --------------------------------------
# module load cuda/12.8
if [[ -z ${MEGARL_IMAGE:-} && -f $MEGARL_HOME/.venv/bin/activate ]]; then
  # shellcheck source=/dev/null
  source "$MEGARL_HOME/.venv/bin/activate"
fi
export MEGARL_PYTHON=${MEGARL_PYTHON:-python}

# --- the container: "" (none), a file IMAGE.sif for apptainer, or an image for pyxis (.sqsh file or REGISTRY#IMAGE:TAG) -
export MEGARL_IMAGE=${MEGARL_IMAGE:-}
export MEGARL_MOUNTS=${MEGARL_MOUNTS:-} # further mounts, A:B,C:D; the working folder is always mounted

# --- the network: all processes of a job listen on this interface only ("": that of the default route) -----------------
export MEGARL_INTERFACE=${MEGARL_INTERFACE:-}
# export NCCL_IB_HCA=mlx5_0,mlx5_1

# --- limits -------------------------------------------------------------------------------------------------------------
export MEGARL_MAX_REQUEUES=${MEGARL_MAX_REQUEUES:-100} # after this many requeues a job ends
export MEGARL_GRACE_S=${MEGARL_GRACE_S:-60}            # seconds for the other tasks after one has ended
export MEGARL_PROBE_S=${MEGARL_PROBE_S:-60}            # seconds for a healthy node to start a task, after a failure

# --- threads and caches -------------------------------------------------------------------------------------------------
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
# export CUDA_DEVICE_MAX_CONNECTIONS=8 # for trainer ranks, in place of megarl's own choice by their layout and GPUs
# export HF_HOME=/shared/huggingface
# export HF_HUB_OFFLINE=1            # for compute nodes without network: fetch models and data on the login node
