"""Bugs written by hand in rollouts, rewards, the trainer, the launcher and the transfer of weights."""

from __future__ import annotations

from mutant import Bugs, unit

ROLLOUT: Bugs = {
    "megarl/rollout/conversation.py": {
        unit("rollout/test_conversation"): [
            ("a rewritten prompt continues the sequence", "text.startswith(self._read):", "self._read:"),
            (
                "every prompt begins another sequence",
                "if self.segments and text.startswith",
                "if False and text.startswith",
            ),
            (
                "the token that ended an answer is asked for twice",
                "self._read += content + end",
                "self._read += content",
            ),
            ("a stop string is taken for the end of the turn", "or by_string or", "or"),
            ("answers that two continue are trained twice", "segment.give(self.tokens)", "segment = self.segments[-1]"),
            ("a copy shares its sequences", "[segment.copy() for segment in self.segments]", "list(self.segments)"),
        ],
    },
    "megarl/rollout/transcript.py": {
        unit("rollout/test_conversation"): [
            ("each segment is a sample", "owners += [index] * len(kept)", "owners += range(len(kept))"),
            ("segments never sampled stay", "if any(segment.sampled)] or list(sample[-1:])", "]"),
        ],
    },
    "megarl/rollout/executor.py": {
        unit("rollout/test_executor"): [
            ("runs of a prompt share ids of samples", "samples + first)", "samples)"),
            ("a poisoned segment leaves the others in", "(~bad)[samples].nonzero()", "(~bad).nonzero()"),
        ],
    },
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
                "if not math.isfinite(float(value)):",
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
    "megarl/rollout/client/completions.py": {
        unit("rollout/test_routing", "rollout/test_sglang_client"): [
            (
                "a server that died counts as an attempt",
                "            if address not in self._router.addresses:\n                tried.pop()",
                "            if False:\n                tried.pop()",
            ),
            (
                "one retry more",
                "if len(tried) > self._config.max_retries:",
                "if len(tried) > self._config.max_retries + 1:",
            ),
            ("no pause before a retry", "self._config.retry_delay_s * 2 ** (len(tried) - 1)", "0.0"),
        ],
    },
    "megarl/rollout/client/requests.py": {
        unit("rollout/test_sglang_client"): [
            (
                "the last token of an aborted part stays",
                "                del values[-1:]",
                "                pass",
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
    "megarl/rollout/estimates.py": {
        unit("rollout/test_estimates"): [
            (
                "pass@k is the plain estimate",
                "math.comb(samples - right, k) / math.comb(samples, k)",
                "(1 - right / samples) ** k",
            ),
            (
                "wilson forgets the square root's second term",
                "share * (1 - share) / trials + z * z / (4 * trials * trials)",
                "share * (1 - share) / trials",
            ),
            (
                "the bootstrap takes one tail",
                "[0.5 - confidence / 2, 0.5 + confidence / 2]",
                "[1 - confidence, confidence]",
            ),
        ],
    },
    "megarl/rollout/evaluate.py": {
        unit("rollout/test_evaluate"): [
            ("every set has all problems", "if self.sets[p] == label]", "if self.sets[p]]"),
            (
                "problems with few samples count for pass@k",
                "in (scored[p] for p in problems) if len(s) >= k]",
                "in (scored[p] * k for p in problems)]",
            ),
        ],
    },
    "megarl/rollout/bounded_staleness.py": {
        unit("rollout/test_bounded_staleness"): [
            ("rewards of refused groups are lost", "episode.dropped, origin, rewards)", "episode.dropped, origin)"),
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

ENVIRONMENTS: Bugs = {
    "megarl/environments/host.py": {
        unit("environments/test_closing"): [
            ("the end interrupts nothing", "            raise Ended\n", "            return\n"),
            ("a close that fails is not written down", 'file.write(f"{_cause(error)}\\n")', 'file.write("")'),
        ],
        unit("environments/test_environment_pool"): [
            ("a forked child answers for its parent", "if os.getpid() != pid:", "if False:"),
            ("what an environment prints is the run's output", "os.dup2(2, 1)", "os.dup2(1, 1)"),
            ("done may be text", "if isinstance(done, str):", "if False:"),
        ],
    },
    "megarl/environments/ending.py": {
        unit("environments/test_closing"): [
            ("a hanging close goes on", "                kill_group(pid)\n", "                pass\n"),
            ("each failing close is named", "if failure not in self._named:", "if True:"),
        ],
        unit("environments/test_environment_pool"): [
            (
                "a child in a session of its own goes on",
                "                    process.kill()\n",
                "                    pass\n",
            ),
        ],
    },
    "megarl/environments/pool.py": {
        unit("environments/test_closing"): [
            ("a place is free before its process has ended", "ended.add_done_callback(free)", "free(ended)"),
            ("an idle environment is not closed", "self._ends.all_of([process.pid for process in self._live])", ""),
        ],
        unit("environments/test_environment_pool"): [
            ("a process that died while idle is lent", "if not process.reader.at_eof():", "if True:"),
            (
                "the text of a reset may have any length",
                "            self._checked(observation)\n        elif",
                "        elif",
            ),
            ("a message may have other keys", " or len(message) != 2", ""),
        ],
    },
    "megarl/rollout/workflows/environment.py": {
        unit("rollout/test_environment_workflow"): [
            ("an answer after the last turn is asked for", "if turn < self.pool.config.max_turns:", "if True:"),
            ("an episode lost in its reset is no sample", "if not conversation.segments:", "if False:"),
            ("tools are not described", '{"tools": pool.tools} if pool.tools else {}', "{}"),
            ("a tool's result keeps its role", 'if message["role"] == "tool" else', "if False else"),
            ("a sum of rewards may be infinite", "if not abs(total) <= MAX_REWARD:", "if False:"),
        ],
    },
}

REWARDS: Bugs = {
    "megarl/forks.py": {
        unit("rewards/test_pool_ends", "rewards/test_pool"): [
            ("a worker outlives its server", "        die_with_parent(server_pid)\n", ""),
            ("the server outlives the run", "    die_with_parent(os.getppid())\n", ""),
        ],
    },
    "megarl/rewards/worker.py": {
        unit("rewards/test_pool_ends", "rewards/test_pool"): [
            (
                "a reward of text passes",
                "if isinstance(value, str):",
                "if False:",
            ),
        ],
    },
    "megarl/rewards/pool.py": {
        unit("rewards/test_pool"): [
            ("weights are ignored", "sum(weight * value for weight, value in", "sum(value for _, value in"),
            ("a share of a dead worker is lost", "        self._queue.extendleft(reversed(worker_.share))\n", ""),
        ],
        unit("rewards/test_lists"): [
            ("None counts as 0", "math.nan if value is None else value", "0.0 if value is None else value"),
        ],
    },
    "megarl/rewards/lists.py": {
        unit("rewards/test_lists"): [
            ("a message is one of the text's characters", "        turn.message = self.messages[index]\n", ""),
            ("a function of lists sees one completion", "takes_lists = True", "takes_lists = False"),
            ("an async function of lists is not awaited", "if inspect.isawaitable(values):", "if False:"),
            ("a column of the plural's name is lost", "if name not in columns and name.ends", "if name.ends"),
            (
                "a column replaces the completions",
                '**columns, "completions": answers}',
                '"completions": answers, **columns}',
            ),
        ],
    },
}

TRAINER: Bugs = {
    "megarl/trainer/checkpoints/saver.py": {
        unit("trainer/test_saver"): [
            ("generators are not restored", "        self._restore_generators(checkpoint)\n", ""),
            ("a damaged folder of the same step stays", "            self._remove(final)\n", "            pass\n"),
            ("one checkpoint more is kept", "[: self.config.keep][-1]", "[: self.config.keep + 1][-1]"),
            ("a damaged checkpoint counts as kept", "            self._damaged.add(name)\n", ""),
            (
                "a checkpoint written again counts as damaged",
                "        self._damaged.discard(final.name)\n",
                "",
            ),
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
            ("files are not flushed", "        flush(path)\n        files[", "        files["),
            ("the manifest and folders are not flushed", "folder):\n        flush(path)", "folder):\n        pass"),
            ("the manifest is not flushed", "for path in (folder / NAME, *(p for", "for path in (*(p for"),
            ("a new name is not flushed", "    flush(to.parent)\n", ""),
        ],
        unit("trainer/test_saver"): [
            ("a file of another size passes", "if found != size:", "if False:"),
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
            ("the exit code of a rank is swallowed", "return code if code >= 0", "return 0 if code >= 0"),
            ("a run that was ended ends with 0", "int(None in rank_codes))", "0)"),
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
    "megarl/reshard/plan/sglang_adapters.py": {
        unit("reshard/test_sglang_adapters"): [
            ("A of each part lies first in its stack", "(number * rank, column)", "(0, column)"),
            ("B of each part lies first in its stack", "ParameterPart((row, 0)", "ParameterPart((0, 0)"),
        ],
    },
    "megarl/reshard/sync/live_adapters.py": {
        unit("reshard/test_sglang_adapters"): [
            ("rows without an adapter keep what they had", "        buffer.zero_()", "        pass"),
            ("an adapter that may be evicted is taken", "        if not ref.pinned:", "        if False:"),
        ],
    },
    "megarl/reshard/session.py": {
        unit("reshard/test_places"): [
            ("a server without the base gets adapters alone", "= bool(adapters) and unchanged", "= bool(adapters)"),
        ],
    },
    "megarl/rollout/servers/served_adapters.py": {
        unit("reshard/test_sglang_adapters"): [
            ("a server scales by alpha / rank alone", "self.shape.scale * rank", "self.shape.alpha"),
        ],
    },
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

OBSERVE: Bugs = {
    "megarl/dashboard.py": {
        unit("test_dashboard"): [
            ("any key opens the dashboard", "if not hmac.compare_digest(", "if False and hmac.compare_digest("),
            ("any host name reaches the dashboard", 'host.rpartition(":")[0] not in LOOPBACK and', "False and"),
            ("pages of other sites reach the dashboard", 'origin != f"http://{host}"', "False"),
            ("links of the folder are followed", "entry.is_dir(follow_symlinks=False)", "entry.is_dir()"),
        ],
    },
    "megarl/observe/board/growing_file.py": {
        unit("observe/test_growing_file"): [
            ("half a line is read", 'end = data.rfind(b"\\n") + 1', "end = len(data)"),
            ("a replaced file is read on", "if found.st_ino != self._inode or ", "if "),
        ],
    },
    "megarl/observe/board/document.py": {
        unit("observe/test_page"): [
            ("a text can end its block", '.replace("<", "\\\\u003c")', ""),
        ],
    },
    "megarl/observe/timeline.py": {
        unit("observe/test_timeline"): [
            ("overlapping spans share a row", "if not row or end <= row[-1]", "if True"),
            ("touching spans share no row", "row[-1] <= start", "row[-1] < start"),
            (
                "spans left out add up over steps",
                "left_out, self._left_out = self._left_out, 0",
                "left_out = self._left_out",
            ),
        ],
    },
    "megarl/observe/board/curves.py": {
        unit("observe/test_curves"): [
            ("hours begin in 1970", "(time - known[0][1]) / 3600", "time / 3600"),
            ("long stages are cut", "for part in (rows[i : i + group]", "for part in (rows[i : i + 1]"),
        ],
    },
}
