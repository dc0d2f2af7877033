"""Bugs written by hand in what only GPUs, several nodes and settings of other trainers show."""

from __future__ import annotations

from mutant import Bugs, unit

CLUSTERS: Bugs = {
    "megarl/actor/weights/saved_file.py": {
        unit("actor/test_saved_file"): [("nothing is flushed", "        os.fsync(file.fileno())\n", "        pass\n")],
    },
    "megarl/parallel/watchdog.py": {
        unit("parallel/test_watchdog"): [
            ("file servers have a minute", "GUARD_EVERY, FROZEN_SHARED_S)", "GUARD_EVERY)")
        ],
    },
    "megarl/launcher/server_task.py": {
        unit("launcher/test_server_task"): [
            (
                "the end is asked for by name",
                "rendezvous.ENDED in os.listdir(folder)",
                "(folder / rendezvous.ENDED).exists()",
            )
        ],
    },
    "megarl/rollout/servers/server_config.py": {
        unit("rollout/test_gpu_placement"): [
            ("ranks meet at a port", '"SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"', '"NO_OVERRIDE"'),
        ],
    },
    "megarl/rollout/servers/gpu_backends.py": {
        unit("rollout/test_gpu_placement"): [
            ("a draft's weights are not kept", '    "enable_draft_weights_cpu_backup": True,\n', ""),
            ("triton reads E4M3 on every GPU", "TRITON_READS_FP8 = (8, 9)", "TRITON_READS_FP8 = (8, 0)"),
            ("the model's default is not looked at", 'chosen["attention_backend"] = default', "pass"),
            ("copied projections are taken", 'sglang.get("dcp_replicate_q_proj") or ', ""),
            ("backends that copy projections are taken", ' or sglang.get("dcp_comm_backend") in REPLICATING', ""),
        ],
    },
    "megarl/rollout/servers/gpu_placement.py": {
        unit("rollout/test_gpu_placement"): [
            ("the numbers are set before CUDA has read the UUIDs", "    torch.cuda.init()\n", ""),
            ("children number GPUs by speed", ', "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}', "}"),
        ],
    },
    "megarl/rollout/servers/guarded_launch.py": {
        unit("rollout/test_guarded_launch"): [
            ("the watchdog counts pauses", "        scheduler.cur_batch_for_debug = None\n", ""),
        ],
    },
    "megarl/served_checks.py": {
        unit("rollout/test_gpu_placement"): [
            (
                "sinks are flashinfer's",
                "isinstance(block, LatentAttention) or block.sinks",
                "isinstance(block, LatentAttention)",
            ),
        ],
    },
    "megarl/reshard/sync/sglang_hooks.py": {
        ("tests/sglang/test_in_place_pause.py",): [
            ("a pending step gets the new version", "    label_pending_steps()\n    share_", "    share_"),
            (
                "tokens after a pending step keep its version",
                "        record_weight_version_events(batch.reqs, old_version=version)\n",
                "",
            ),
            ("a prompt begins on old caches", "    Req.init_next_round_input = begin_named\n", ""),
        ],
        unit("reshard/test_cache_keys"): [
            ("a rank gives keys before its first version", "holds_kv or not synced:", "holds_kv:"),
            ("the queue knows no cached prompts", "    Scheduler._add_request_to_queue = add_named\n", ""),
            (
                "a request that has begun changes its key",
                "if request.kv.holds_kv or not synced:",
                "if not synced:",
            ),
            (
                "keys grow at each sync",
                "request.__dict__.setdefault(OWN_CACHE_KEY, request.extra_key)",
                "request.extra_key",
            ),
        ],
    },
    "megarl/reshard/sync/attempt.py": {
        ("tests/distributed/test_relayed_syncs.py",): [
            ("servers' hashes stay", "for number in range(receivers)]", "for number in range(0)]"),
        ],
    },
    "megarl/trainer/checkpoints/saver.py": {
        unit("trainer/test_flush"): [
            ("lines may be lost", "(*self._lines, self.folder.parent)", "(self.folder.parent,)")
        ],
        unit("trainer/test_run_owner"): [("another's folder is written", "                self._check_owner()\n", "")],
    },
    "megarl/trainer/run.py": {
        unit("trainer/test_flush"): [
            (
                "episodes may be lost",
                "(folder.metrics, folder.episodes, folder.samples)",
                "(folder.metrics, folder.samples)",
            ),
        ],
        unit("trainer/test_run_metrics"): [
            ("another's metrics go on", "self._check_owner()\n            self._logger", "self._logger"),
            ("another's batches are kept", "self._check_owner()\n            with timeline", "with timeline"),
            ("another's steps go on", "self._check_owner()\n                self._profiler", "self._profiler"),
        ],
    },
    "megarl/trainer/replay/kept_batches.py": {
        unit("trainer/test_flush"): [("a batch has its name at once", "save(tensors, writing,", "save(tensors, path,")],
    },
    "megarl/observe/run_folder.py": {
        unit("observe/test_run_folder"): [
            (
                "a taken name ends the command",
                "with contextlib.suppress(FileExistsError):",
                "with contextlib.nullcontext():",
            ),
        ],
    },
    "megarl/parallel/megatron_patches.py": {
        unit("parallel/test_megatron_patches"): [
            ("gathers of one call go through gloo's coalesced one", "        _gather_apart()\n", "        pass\n"),
            ("gathers are not waited for", "            work.wait()\n", "            pass\n"),
        ],
        ("tests/te/test_stand_in.py",): [
            ("a router's bias keeps its dtype", "None if bias is None else bias.to(dtype)", "bias"),
            (
                "contexts of offloading are copied",
                "            type(context).__deepcopy__ = lambda this, _: this\n",
                "            pass\n",
            ),
        ],
    },
    "megarl/actor/model/adapters.py": {
        ("tests/te/test_stand_in.py",): [
            ("offloaded layers without adapters have no gradient", " or config.cpu_offloading", ""),
        ],
    },
    "megarl/actor/gpu/fp8.py": {
        unit("actor/test_fp8"): [
            ("parts of blocks are gathered", "parallel.sequence_parallel and shape.hidden % _GATHERED", "False"),
            (
                "experts one after another take fp8",
                '        "actor.experts=sequential": config.experts == "sequential",\n',
                "",
            ),
        ],
    },
    "megarl/actor/gpu/userbuffers.py": {
        unit("actor/test_userbuffers"): [("every GPU has multicast", "capability < (9, 0)", "capability < (0, 0)")],
    },
    "megarl/actor/gpu/attention_kernels.py": {
        unit("actor/test_attention_kernels"): [
            ("cuDNN takes packed sequences from 8.0 on", "_CUDNN_PACKED = (9, 0)", "_CUDNN_PACKED = (8, 0)"),
            ("cuDNN takes packed sequences on 12.0", "_CUDNN_UNPACKED = (12, 0)", "_CUDNN_UNPACKED = (13, 0)"),
            ("cuDNN trains large heads everywhere", "if capability == (9, 0) else _CUDNN_HEADS", ""),
            ("cuDNN scores small heads only", "if trains and block.head_dim > most", "if block.head_dim > most"),
            ("flash-attn runs on all GPUs", "_FLASH_CAPABILITY = (8, 0)", "_FLASH_CAPABILITY = (7, 0)"),
            ("flash-attn has sinks", '    if block.sinks:\n        return "has no sinks"\n', ""),
            ("flash-attn takes large heads on 8.9", " if capability in _FLASH_WIDE else _FLASH_HEADS", ""),
            ("flash-attn need not be there", 'return "" if is_installed else _NOT_INSTALLED', 'return ""'),
            ("cut sequences may store scores", "not (is_cut or is_long)", "not is_long"),
            ("long sequences may store scores", "not (is_cut or is_long)", "not is_cut"),
            ("one kernel of two is not enough", "if not cudnn or not flash:", "if not cudnn and not flash:"),
            ("a variable chooses a kernel", ', "NVTE_UNFUSED_ATTN")', ")"),
        ],
    },
    "megarl/actor/engine.py": {
        unit("actor/test_attention_kernels"): [
            ("an engine asks no GPU for kernels", ", *kernel_checks(*of_model, trains=trainable))", ",)"),
            ("log-probs need a backward kernel", "trains=trainable", "trains=True"),
        ],
    },
    "megarl/trainer/inputs.py": {
        unit("actor/test_attention_kernels"): [
            ("a run asks no GPU for kernels", ", *kernel_checks(config, model)]", "]")
        ],
    },
    "megarl/trainer/replay/checks.py": {
        unit("actor/test_attention_kernels"): [
            ("a replay asks no GPU for kernels", ", *kernel_checks(config, model)]", "]")
        ],
    },
    "megarl/actor/checks.py": {
        unit("actor/test_attention_kernels"): [
            ("variables choose kernels", "attention_kernels.check_variables, os.environ", "dict, os.environ")
        ],
    },
    "megarl/actor/policy.py": {
        ("tests/distributed/test_rank_batches.py",): [
            ("a rank numbers its own tokens", "rank_batches.join(batch, self.groups)", "(batch, slice(None))"),
        ],
    },
    "megarl/algorithms/dapo.py": {
        unit("algorithms/test_dapo"): [
            ("all answers count together", 'counts, "amax")', 'counts, "sum")'),
            (
                "a run goes on in the next sequence",
                "mask.roll(1).index_fill(0, batch.cu_seqlens[:-1].long(), False)",
                "mask.roll(1)",
            ),
            ("the penalty is always 1", "-self.config.overlong_penalty * ", "-"),
        ],
    },
    "megarl/foreign/areal.py": {
        unit("test_foreign"): [
            (
                "tokens above AReaL's cap are trained on",
                '"algorithm.correction", "mask"',
                '"algorithm.correction", "truncate"',
            )
        ],
    },
    "megarl/foreign/verl.py": {
        unit("test_foreign"): [("megarl's defaults of PPO stay", '**(PPO_DEFAULTS if algorithm == "ppo" else {})', "")],
    },
    "megarl/foreign/trl.py": {
        unit("test_foreign"): [
            (
                "GSPO has its own mean",
                '"dapo", "gspo"):\n        reading.set("loss_type"',
                '"dapo"):\n        reading.set("loss_type"',
            ),
            (
                "TRL's default weight is dropped",
                'if command == "grpo":\n        _correction(reading)\n',
                "if False:\n        pass\n",
            ),
            (
                "megarl's lower bound stays",
                '"algorithm.correction_low", low or 0.0',
                '"algorithm.correction_low", low or 0.5',
            ),
            ("a null upper bound is the default", "if key in reading.unset:", "if False:"),
        ],
    },
    "megarl/actor/reports.py": {
        unit("actor/test_policy"): [
            ("metrics keep their graph", "return value.detach() if", "return value if"),
            ("means over tokens count like the loss", "counts.get(name, weight) * value", "weight * value"),
        ],
    },
    "megarl/algorithms/policy_gradient.py": {
        unit("actor/test_policy"): [
            ("a mean is told over one token", 'means["tokens"]) for name', 'means["tokens"].clamp(max=1)) for name')
        ],
    },
    "megarl/trainer/run_owner.py": {
        unit("trainer/test_run_owner"): [
            ("a folder is everybody's", 'owner.get("token", self._token) != self._token', "False"),
            ("a number is enough", 'abs(process.create_time() - owner["process_started"]) < 1', "True"),
            ("a zombie runs", "return same and process.status() != psutil.STATUS_ZOMBIE", "return same"),
            ("a copy is its original's", 'if owner["folder"] != _place(folder):', "if False:"),
            ("adapters are resumed beside themselves", 'ADAPTERS).glob("*")', 'ADAPTERS).glob("none")'),
            ("hosts share numbers", 'owner["host"] != socket.gethostname() or ', ""),
        ],
    },
    "megarl/trainer/saved_config.py": {
        unit("trainer/test_run_owner"): [
            (
                "a run is resumed beside itself",
                "    folder = open_run(config.resume)\n    check_ended(folder)\n",
                "    folder = open_run(config.resume)\n",
            )
        ],
    },
    "megarl/data/prepare.py": {
        unit("data/test_prepared_once"): [("each rank prepares all", "with _alone(file), ", "with ")],
    },
    "megarl/trainer/reference_logprobs.py": {
        unit("trainer/test_reference_identity"): [
            ("each rank writes", "    if is_rank0():\n        _write(path, tensors)\n", "    _write(path, tensors)\n"),
            ("other machines' folders stay empty", "    if not path.is_file():  # another", "    if False:  # another"),
        ],
    },
}
