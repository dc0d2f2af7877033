#!/bin/bash
# What differs from cluster to cluster. Sourced by every script here, on every node; edit it, or set the variables before
# sbatch, which passes them on. No hyperparameters: those are in configs/experiment/.

# --- the environment: a module, a virtual environment, or nothing where a container brings all -------------------------
# module load cuda/12.8
if [[ -z ${MEGARL_IMAGE:-} && -f $MEGARL_HOME/.venv/bin/activate ]]; then
  # shellcheck source=/dev/null
  source "$MEGARL_HOME/.venv/bin/activate"
fi
export MEGARL_PYTHON=${MEGARL_PYTHON:-python}

# --- the container: "" (none), a file IMAGE.sif for apptainer, or what pyxis takes (a .sqsh file or REGISTRY#IMAGE:TAG) -
export MEGARL_IMAGE=${MEGARL_IMAGE:-}
export MEGARL_MOUNTS=${MEGARL_MOUNTS:-} # more folders that the container sees, A:B,C:D; the working folder is one anyway

# --- the network: everything of a job listens on this interface and on no other ("": the one of the default route) -----
export MEGARL_INTERFACE=${MEGARL_INTERFACE:-}
# export NCCL_IB_HCA=mlx5_0,mlx5_1

# --- how long -----------------------------------------------------------------------------------------------------------
export MEGARL_MAX_REQUEUES=${MEGARL_MAX_REQUEUES:-100} # a job that was requeued so often is left to its user
export MEGARL_GRACE_S=${MEGARL_GRACE_S:-60}            # seconds for the other tasks to end, once one has
export MEGARL_PROBE_S=${MEGARL_PROBE_S:-60}            # seconds in which a healthy node starts a task, after a failure

# --- threads and caches -------------------------------------------------------------------------------------------------
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} # Megatron overlaps tensor parallel traffic by it
# export HF_HOME=/shared/huggingface
# export HF_HUB_OFFLINE=1            # where compute nodes reach no network: fetch models and data on the login node
