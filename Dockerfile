# megarl with everything that it uses on GPUs (docs/install_gpu.md):
#   docker build --build-arg MAX_JOBS=16 --tag megarl .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 -it megarl
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV DEBIAN_FRONTEND=noninteractive \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    VIRTUAL_ENV=/opt/megarl \
    PATH=/opt/megarl/bin:$PATH

# g++ and Python's headers build csrc/; SGLang's kernels load libnuma, and it binds servers by numactl; NCCL finds
# InfiniBand cards through libibverbs, and goes over TCP without a word where it is missing; git is for apex.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends \
    g++ git ibverbs-providers libibverbs1 libnuma1 librdmacm1 make numactl python3.12-dev python3.12-venv \
 && rm -rf /var/lib/apt/lists/* \
 && python3.12 -m venv "$VIRTUAL_ENV"

WORKDIR /opt/src/megarl

# Layers that change seldom come first: a change of megarl's source rebuilds the last two alone.
COPY requirements/gpu.txt requirements/gpu_built.txt requirements/build_gpu_packages.sh requirements/
RUN python -m pip install --requirement requirements/gpu.txt

# How many compilers run at once (each takes some 4 GB), and for which GPUs: A100, H100, B200.
ARG MAX_JOBS=8
ARG TORCH_CUDA_ARCH_LIST="8.0 9.0 10.0"
RUN bash requirements/build_gpu_packages.sh

COPY . .
RUN MEGARL_CUDA=1 python -m pip install --no-build-isolation --no-deps --editable . \
 && python -m megarl.doctor

WORKDIR /workspace
CMD ["/bin/bash"]
