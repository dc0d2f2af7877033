"""Bugs written by hand in rollouts, rewards, the trainer, the launcher and the transfer of weights."""

from __future__ import annotations

from mutant import Bugs, unit

ROLLOUT: Bugs = {
    "megarl/rollout/reward_call.py": {
        unit("rollout/test_rlvr"): [
            (
                "an async reward that fails is 0.0",
                "                return _failure(reward_fn, error)\n\n        return list",
                "                return 0.0\n\n        return list",
            ),
            ("a sync reward that fails is 0.0", "rewards.append(_failure(reward_fn, error))", "rewards.append(0.0)"),
            (
                "a reward of NaN passes",
                "if isinstance(value, str) or not math.isfinite(float(value)):",
                "if isinstance(value, str):",
            ),
        ],
    },
    "megarl/rollout/routing.py": {
        unit("rollout/test_routing"): [
            (
                "the load of a returned server is wrong",
                "if not lost.done():  # else the server may be back in service with a new count",
                "if address in self._load:",
            ),
            (
                "a request over the limit is sent",
                "self._load[a] + count <= self.max_per_server or self._load[a] == 0",
                "True",
            ),
        ],
        unit("rollout/test_withheld_answers"): [
            ("a withheld version is one too high", "newest < self._held_version", "newest <= self._held_version"),
            ("an answer of a lost server is used", "if lost.done():  # also", "if False:  # also"),
            (
                "answers of earlier versions are withheld too",
                "release is None or newest < self._held_version",
                "release is None",
            ),
        ],
    },
    "megarl/rollout/client/sglang_client.py": {
        unit("rollout/test_routing", "rollout/test_sglang_client"): [
            (
                "a server that died counts as an attempt",
                "            if address not in self.router.addresses:\n                tried.pop()",
                "            if False:\n                tried.pop()",
            ),
            (
                "one retry more",
                "if len(tried) > self.config.max_retries:",
                "if len(tried) > self.config.max_retries + 1:",
            ),
            ("no pause before a retry", "self.config.retry_delay_s * 2 ** (len(tried) - 1)", "0.0"),
        ],
    },
    "megarl/rollout/client/requests.py": {
        unit("rollout/test_sglang_client"): [
            (
                "the last token of an aborted part stays",
                'if self.reason == "abort":\n            for',
                "if False:\n            for",
            ),
            (
                "completions begin anew with all tokens allowed",
                '"max_new_tokens": gconfig.max_new_tokens - done',
                '"max_new_tokens": gconfig.max_new_tokens',
            ),
            (
                "versions are not compared with the tokens",
                "if not consistent or len(versions) != len(output_ids):",
                "if not consistent:",
            ),
        ],
    },
    "megarl/rollout/bounded_staleness.py": {
        unit("rollout/test_bounded_staleness"): [
            ("max_failures counts in total", "self._failures + 1 if failed else 0", "self._failures + int(failed)"),
            ("a requeued prompt goes to the end", "self._queue.appendleft(ticket)", "self._queue.append(ticket)"),
            (
                "a requeued prompt keeps its first version",
                "            ticket.version = self._version\n",
                "            ticket.version = self._version if not ticket.requeued else ticket.version\n",
            ),
            (
                "one requeue more",
                "ticket.requeued < self.limits.max_requeues",
                "ticket.requeued <= self.limits.max_requeues",
            ),
            (
                "one failure more",
                "self._failures > self.limits.max_failures",
                "self._failures > self.limits.max_failures + 1",
            ),
            (
                "a version too old stays",
                "version + self.limits.max_head_offpolicyness - self._version",
                "version + self.limits.max_head_offpolicyness + 1 - self._version",
            ),
            (
                "room for a batch too many",
                "(self.limits.max_head_offpolicyness + 1) * self.batch_size - self._handed",
                "(self.limits.max_head_offpolicyness + 2) * self.batch_size - self._handed",
            ),
            (
                "finished prompts are lost by a checkpoint",
                "sorted([*open_tickets, *(t for t, _ in self._finished.values())],",
                "sorted(open_tickets,",
            ),
        ],
    },
}

REWARDS: Bugs = {
    "megarl/rewards/worker.py": {
        unit("rewards/test_pool_ends", "rewards/test_pool"): [
            ("a worker outlives its server", "        die_with_parent(server_pid)\n", ""),
            ("the server outlives the run", "    die_with_parent(os.getppid())\n", ""),
            (
                "a reward of text passes",
                "isinstance(value, str) or not math.isfinite(number := float(value))",
                "not math.isfinite(number := float(value))",
            ),
        ],
    },
    "megarl/rewards/pool.py": {
        unit("rewards/test_pool"): [
            ("weights are ignored", "sum(weight * value for weight, value in", "sum(value for _, value in"),
            ("a share of a dead worker is lost", "        self._queue.extendleft(reversed(worker_.share))\n", ""),
        ],
    },
}

TRAINER: Bugs = {
    "megarl/trainer/checkpoints/saver.py": {
        unit("trainer/test_saver"): [
            ("generators are not restored", "        self._restore_generators(checkpoint)\n", ""),
            ("a damaged folder of the same step stays", "            self._remove(final)\n", "            pass\n"),
            ("one checkpoint fewer is kept", "[self.config.keep :]", "[self.config.keep - 1 :]"),
            ("sizes are not checked", "                read.check_sizes()\n", ""),
            (
                "content is not checked",
                "                read.check_content(rank, world)  # each rank reads a share of the files\n",
                "",
            ),
        ],
        unit("trainer/test_saver", "trainer/test_saver_ranks"): [
            (
                "one rank's report of damage is not heard",
                "problem = next((text for text in gather_json(problem) if text), None)",
                "problem = gather_json(problem)[rank]",
            ),
            ("each rank reads all but its share", "read.check_content(rank, world)", "read.check_content(0, world)"),
            ("one rank's failed write is not heard", 'if part["error"]]', 'if part["error"] and rank == 0]'),
        ],
    },
    "megarl/trainer/checkpoints/manifest.py": {
        unit("trainer/test_flush"): [
            ("files are not flushed", "        _sync(path)\n        files[", "        files["),
            ("the manifest and folders are not flushed", "folder):\n        _sync(path)", "folder):\n        pass"),
            ("the manifest is not flushed", "for path in (folder / NAME, *(p for", "for path in (*(p for"),
            ("a new name is not flushed", "    _sync(to.parent)\n", ""),
        ],
        unit("trainer/test_saver"): [
            ("a file of another size passes", "if path.stat().st_size != size:", "if False:"),
            ("another digest passes", "if digest != self.files[name][1]:", "if False:"),
            ("the first of several parts is read by all", "sorted(self.files)[part::parts]", "sorted(self.files)[1:]"),
        ],
    },
    "megarl/trainer/checkpoints/rng_state.py": {
        unit("trainer/test_saver"): [
            ("Python's generator is not restored", "    random.setstate((version, tuple(words), next_gauss))\n", ""),
            ("new ranks draw alike", "{snapshot['torch']}:{rank}", "{snapshot['torch']}"),
        ],
    },
}

LAUNCHER: Bugs = {
    "megarl/launcher/watch.py": {
        unit("launcher/test_local"): [
            (
                "the exit code of a rank is swallowed",
                "return next((code for code in (*rank_codes, *server_codes) if code), 0)",
                "return 0",
            ),
            (
                "the exit code of a run that was ended is swallowed",
                "return next((code for code in (*rank_codes, *server_codes) if code), 1)",
                "return 0",
            ),
            ("servers are not told of the end", '        publish(folder, ENDED, "")\n', "        pass\n"),
        ],
    },
    "megarl/launcher/server_task.py": {
        unit("launcher/test_server_task"): [
            ("a server that gave up ends with 0", "EXIT_GAVE_UP = 1", "EXIT_GAVE_UP = 0"),
            ("the cause of the end is not raised", "                    supervisor.raise_cause()\n", ""),
        ],
    },
    "megarl/processes.py": {
        unit("launcher/test_local"): [
            ("a process outlives its parent", "prctl(PR_SET_PDEATHSIG, signal.SIGKILL)", "prctl(PR_SET_PDEATHSIG, 0)"),
        ],
    },
}

RESHARD: Bugs = {
    "megarl/reshard/transfer/delta.py": {
        unit("reshard/test_delta"): [
            (
                "values are compared, not bits",
                "(new.reshape(-1).view(bits) != old.reshape(-1).view(bits))",
                "(new.reshape(-1) != old.reshape(-1))",
            ),
            (
                "an index one past the end is written",
                "int(index.max()) >= target.numel()",
                "int(index.max()) > target.numel()",
            ),
            ("a negative index is written", "int(index.min()) < 0 or", ""),
            ("arrays are not padded", "return -(-nbytes // 8) * 8", "return nbytes"),
        ],
    },
    "megarl/reshard/transfer/shard_transfer.py": {
        unit("reshard/test_shard_transfer", "reshard/test_delta"): [
            ("the copy for deltas is taken at every packing", "if self.keep and last:", "if self.keep:"),
            ("a copy is kept though no delta is wanted", "if self.keep and last:", "if last:"),
            (
                "deltas larger than the bucket are sent",
                "if delta.encoded_bytes(counts, views.itemsizes) < last_sent.numel():",
                "if True:",
            ),
        ],
    },
    "megarl/reshard/transfer/store.py": {
        unit("reshard/test_shard_transfer", "reshard/test_server_rank"): [
            ("a deadline never passes", "if seconds_left <= 0:", "if False:"),
        ],
    },
}
