"""Bugs written by hand in what only runs on GPUs need: memory that is given up, and what NCCL and SGLang inherit."""

from __future__ import annotations

from mutant import Bugs, unit
from mutant_table_feed import DEVICE

GPU: Bugs = {
    "megarl/rollout/servers/inherited_environment.py": {
        unit("rollout/test_inherited_environment"): [
            ("a server waits for torchrun's store", '("TORCHELASTIC_", ', "("),
            ("a server has a rank's place", "name not in PLACE and ", ""),
            ("a co-located server has segments that grow", "if colocated else ()", "if not colocated else ()"),
            ("all options of the allocator go", "_without_segments(kept[name])", '""'),
        ],
        unit("parallel/test_hardware_queues"): [
            ("a server has one hardware queue", "name != hardware_queues.VARIABLE and ", ""),
        ],
    },
    "megarl/parallel/nccl_memory.py": {
        unit("rollout/test_inherited_environment"): [
            ("the user's kind of memory is lost", "os.environ.get(VARIABLE, ", "{}.get(VARIABLE, "),
            ("symmetric memory is no reason", 'sglang.get("enable_symm_mem")', "None"),
            ("NCCL's default differs from SGLang's", '"deepep_v2" else "0"', '"deepep_v2" else "1"'),
        ],
    },
    "megarl/rollout/servers/server_config.py": {
        unit("rollout/test_inherited_environment"): [
            (
                "a server keeps SGLang's own kind of memory",
                "        environment[nccl_memory.VARIABLE] = nccl_memory.setting(sglang)\n",
                "",
            ),
        ],
        unit("rollout/test_gpu_placement"): [
            ("graphs of decoding stay", "            environment |= gpu_backends.COLOCATED_ENVIRONMENT\n", ""),
        ],
    },
    "megarl/rollout/servers/gpu_backends.py": {
        unit("rollout/test_gpu_placement"): [
            ("graphs of prefill stay", '    "disable_prefill_cuda_graph": True,\n', ""),
            ("graphs that stay are taken", "if colocated and", "if False and"),
        ],
    },
    "megarl/actor/gpu/offload.py": {
        unit("actor/test_offload"): [
            ("copies in 8 bits stay", "                copies.clear()", "                pass"),
            ("copies in 8 bits go with gradients", 'if "parameters" in parts:', "if parts:"),
        ],
    },
    "megarl/actor/reference.py": {
        unit("actor/test_offload"): [
            ("a reference's copies in 8 bits stay", "        drop_quantised_copies(self.modules)\n", ""),
        ],
    },
    "megarl/actor/checkpoint/engine_state.py": {
        DEVICE: [
            ("a load leaves the host's parameters", "_copy[owned.main].copy_(owned.main)", "_copy[owned.main].clone()"),
            (
                "a resume looks for main parameters beside these",
                "param_update_in_fp32 = False",
                "param_update_in_fp32 = True",
            ),
            ("a load leaves the main parameters", "owned.main.copy_(owned.param.view", "(owned.param.view"),
        ],
    },
    "megarl/actor/checks.py": {
        unit("actor/test_optimizer"): [
            ("Adam on the host takes decays of delta nets", "not config.lora.rank and decoder", "False and decoder"),
            ("Adam on the host takes float32", 'if config.offload_optimizer and config.dtype == "float32"', "if False"),
        ],
    },
    "megarl/trainer/background_call.py": {
        unit("trainer/test_background_call"): [
            (
                "each call has a stream",
                "            self._stream = _stream(platform.device())",
                "            self._stream = torch.cuda.Stream(platform.device())",
            ),
        ],
    },
    "megarl/launcher/watch.py": {
        unit("launcher/test_local"): [
            ("a signal's number is the run's code", "return code if code >= 0 else 128 - code", "return code"),
        ],
    },
}
