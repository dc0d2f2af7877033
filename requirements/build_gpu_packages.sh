#!/usr/bin/env bash
# Compiles the packages of gpu_built.txt in the active Python environment, which has gpu.txt already.
#   requirements/build_gpu_packages.sh                       all of them
#   requirements/build_gpu_packages.sh transformer-engine    only packages whose names begin so
# Variables: MAX_JOBS (parallel compilers, each takes some 4 GB), TORCH_CUDA_ARCH_LIST (GPUs to compile for).
set -euo pipefail
requirements=$(dirname "$(realpath "$0")")

fail() {
  echo "build_gpu_packages: $1" >&2
  exit 2
}

command -v nvcc >/dev/null || fail "nvcc was not found: install the CUDA 13 toolkit and put its bin/ on PATH"
python -c "import torch, wheel" 2>/dev/null ||
  fail "$(command -v python || echo python) lacks torch or wheel: pip install -r requirements/gpu.txt"

# A toolkit of nvcc alone lacks cusparse.h and its kin. The wheels that torch requires bring them.
nvidia=$(python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/nvidia
headers=$(find -L "$nvidia" -maxdepth 2 -name include -type d | sort | paste -sd:)
libraries=$(find -L "$nvidia" -maxdepth 2 -name lib -type d | sort | paste -sd:)
export CPATH=${headers}${CPATH:+:$CPATH} LIBRARY_PATH=${libraries}${LIBRARY_PATH:+:$LIBRARY_PATH}
export NVTE_FRAMEWORK=pytorch

# flash-attn has a list of its own, by the first architecture of a generation: "8.6 9.0" is 80;90.
if [[ -n ${TORCH_CUDA_ARCH_LIST:-} && -z ${FLASH_ATTN_CUDA_ARCHS:-} ]]; then
  generations=$(grep -oE '[0-9]+\.' <<<"$TORCH_CUDA_ARCH_LIST" | tr -d . | sort -un)
  export FLASH_ATTN_CUDA_ARCHS="${generations//$'\n'/0;}0"
fi

chosen=$(mktemp)
trap 'rm -f "$chosen"' EXIT
grep "^${1:-[a-z]}" "$requirements/gpu_built.txt" >"$chosen" ||
  fail "no package of requirements/gpu_built.txt begins with '$1'"
python -m pip install --disable-pip-version-check --no-build-isolation --requirement "$chosen"
