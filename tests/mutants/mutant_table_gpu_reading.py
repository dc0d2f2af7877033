"""Bugs written by hand in what a reading of the GPU's side mended: gathered adapters, syncs, memory, starts."""

from __future__ import annotations

from mutant import Bugs, unit
from mutant_table_feed import DEVICE

OVERLAP = ("tests/distributed/test_overlap.py",)
GEOMETRY = ("tests/sglang/test_sglang_geometry.py",)
HEAD = ("tests/fake_cuda/test_head.py",)

READING: Bugs = {
    "megarl/actor/model/adapters.py": {
        OVERLAP: [
            (
                "matrices are read past the hook that gathers them",
                "parts = {name: self._part(name)() for",
                "parts = {name: (self._part(name).a, self._part(name).b) for",
            ),
        ],
        unit("actor/test_lora"): [
            ("only whole layers' input needs a gradient", "granularity is not None", 'granularity == "full"'),
        ],
    },
    "megarl/actor/model/moe.py": {
        unit("actor/test_moe_routing"): [
            ("shared experts wait for experts' buffers", "not in (1, layout.tp_size)", "not in (1,)"),
        ],
    },
    "megarl/actor/data_parallel.py": {
        unit("actor/test_gathered_parameters"): [
            ("routers do not wait for gates", "if gate is not None and layer", "if gate is None and layer"),
            ("gates of the last layer alone", "lambda *_, gate=gate:", "lambda *_:"),
        ],
        unit("parallel/test_group_threads"): [("a trained model stays", "vars(ddp).clear()", "pass")],
    },
    "megarl/parallel/groups.py": {
        unit("parallel/test_group_threads"): [
            ("what cycles hold ends later", "destroy_process_group()\n        gc.collect()", "destroy_process_group()"),
        ],
    },
    "megarl/actor/reference.py": {
        unit("actor/test_offload"): [
            ("weights are copied at each rest", "if self._on_host is None:", "if True:"),
            ("weights stay on the device", "            self._on_host.free()", "            pass"),
        ],
    },
    "megarl/actor/gpu/fp8.py": {
        unit("actor/test_fp8"): [
            ("rows of delta nets are not looked at", "if (net := shape.delta_net) is not None:", "if False:"),
        ],
    },
    "megarl/reshard/sync/sglang_hooks.py": {
        GEOMETRY: [("a draft model is updated too", '{"selector": "target"}', "{}")],
    },
    "megarl/reshard/sync/live_parameters.py": {
        GEOMETRY: [
            ("norms with 1 added stay", "            refresh()\n", "            pass\n"),
            ("an unsent bias holds anything", "            parameter.detach().zero_()\n", "            pass\n"),
        ],
    },
    "megarl/reshard/transfer/full_tensor_transfer.py": {
        unit("reshard/test_full_tensor_transfer"): [
            (
                "a projection comes without its partner",
                "            if not name.endswith(suffix) or",
                "            if True or",
            ),
            ("a projection without a partner is lost", "    if waiting:  # of", "    if False:  # of"),
        ],
    },
    "megarl/reshard/transfer/transports/cuda_ipc.py": {
        unit("reshard/test_cuda_ipc"): [
            ("slots lie in expandable segments", r'r"\1False"', r'r"\1True"'),
            ("segments do not grow any more", "AllocatorSettings(settings)", "AllocatorSettings(whole)"),
        ],
    },
    "megarl/reshard/transfer/transports/mapped.py": {
        unit("reshard/test_cuda_ipc"): [
            ("a slot waits for the device", "torch.cuda.current_stream().synchronize()", "torch.cuda.synchronize()"),
        ],
    },
    "megarl/reshard/transfer/transports/base.py": {
        DEVICE: [
            (
                "a receiver of mapped memory hashes on the host",
                'PlainStaging(bucket_bytes, own_device() if cls.on_gpu else "cpu")\n        return',
                "PlainStaging(bucket_bytes)\n        return",
            ),
        ],
    },
    "megarl/parallel/broadcast.py": {
        DEVICE: [("a batch is on the device at once", ".split(PIECE_BYTES // wire_dtype.itemsize)", ".split(2**40)")],
    },
    "megarl/parallel/hardware_queues.py": {
        unit("parallel/test_hardware_queues"): [
            ("a push shares scoring's queue", " and not pushes_beside_scoring", ""),
            ("the engine decides again", "    _entered = True\n", ""),
        ],
    },
    "megarl/ops/divergence.py": {
        HEAD: [
            ("the last chunk lives with the next", "            del chunk, grad, scores\n", ""),
        ],
        ("tests/kernels/test_divergence.py",): [
            (
                "ids of other ranks fall on the last column",
                "local.where(inside, columns)",
                "local.where(inside, columns - 1)",
            ),
        ],
    },
    "megarl/preflight/sizing.py": {
        unit("preflight/test_sizing"): [
            ("free memory decides in deterministic runs", " and not config.deterministic", ""),
            ("more is kept than a GPU allows", "min(size, limit)", "size"),
        ],
    },
    "megarl/gpu_checks.py": {
        unit("test_machine_checks"): [
            ("a machine without GPUs is refused", " or hardware_queues.lowest_major() is None", ""),
            ("a run by the CPU is refused", "not planned or ", ""),
        ],
    },
    "megarl/rollout/servers/external.py": {
        unit("rollout/test_job_servers"): [
            (
                "only the awaited server's failure counts",
                "failure_name(index) for index in range(self._count)",
                "failure_name(0)",
            ),
        ],
    },
    "megarl/forks.py": {
        unit("rewards/test_pool"): [
            ("imports count to the limit of memory", "limit = address_space() + memory", "limit = memory"),
        ],
    },
}
