#!/usr/bin/env bash
# Makes the environment of docs/install_gpu.md in a folder of its own; `make gpu-env` calls it.
#   requirements/gpu_env.sh FOLDER [PYTHON]
# Needs nvcc and no GPU. A part whose requirement files have not changed since it was made is left as it is.
# Variables: GPU_PACKAGES (packages to compile, by the beginning of the name; transformer-engine, or "" for all),
# MAX_JOBS (parallel compilers, 2).
set -euo pipefail
requirements=$(dirname "$(realpath "$0")")
folder=$1
packages=${GPU_PACKAGES-transformer-engine}
export MAX_JOBS=${MAX_JOBS:-2}

fail() {
  echo "gpu-env: $1" >&2
  exit 2
}

runs_here() {
  "$1" -c 'import sys; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

command -v nvcc >/dev/null || fail "nvcc was not found: install the CUDA 13 toolkit and put its bin/ on PATH"
if [[ -n ${2:-} ]]; then
  runs_here "$2" || fail "PYTHON=$2 is not Python 3.12 or 3.13: make gpu-env PYTHON=python3.12"
  python=$2
else
  for python in python3.12 python3.13 python3 none; do
    if runs_here "$python"; then break; fi
  done
  [[ $python != none ]] || fail "no Python 3.12 or 3.13 was found on PATH: make gpu-env PYTHON=/path/to/python3.12"
fi

# made NAME TEXT: true if the part NAME was made from TEXT.
made() { [[ -f $folder/$1.stamp && $(<"$folder/$1.stamp") == "$2" ]]; }
wheels=$("$python" -V; cat "$requirements/gpu.txt")
built=$(cat "$requirements/gpu_built.txt" "$requirements/build_gpu_packages.sh"; echo "$packages")

if ! made wheels "$wheels"; then
  echo "gpu-env: [1/2] wheels of requirements/gpu.txt into $folder (about 10 GB)"
  "$python" -m venv --clear "$folder"
  "$folder/bin/python" -m pip install -qq --disable-pip-version-check --requirement "$requirements/gpu.txt"
  echo "$wheels" >"$folder/wheels.stamp"
fi
if ! made built "$built"; then
  echo "gpu-env: [2/2] compiling ${packages:-all} of requirements/gpu_built.txt with $MAX_JOBS compilers" \
    "(Transformer Engine takes about half an hour on two cores, flash-attn hours)"
  PATH=$(realpath "$folder")/bin:$PATH "$requirements/build_gpu_packages.sh" "$packages"
  echo "$built" >"$folder/built.stamp"
fi
echo "gpu-env: $folder/bin/python has it"
