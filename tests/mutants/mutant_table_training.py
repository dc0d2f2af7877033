"""Bugs written by hand in algorithms, the actor and the data."""

from __future__ import annotations

from mutant import Bugs, unit

ALGORITHMS: Bugs = {
    "megarl/algorithms/opd.py": {
        unit("algorithms/test_rl"): [
            (
                "the teacher pushes the wrong way",
                'batch["teacher_logp"] - batch["prox_logp"]',
                'batch["prox_logp"] - batch["teacher_logp"]',
            ),
            ("log-ratios are not clipped", ".clamp(-config.max_log_ratio, config.max_log_ratio)", ".clamp(-1e9, 1e9)"),
            ("reward_coef is ignored", "advantages = config.reward_coef * broadcast", "advantages = broadcast"),
        ],
        unit("algorithms/test_opd"): [
            (
                "rewards train the teacher's tokens",
                "rewards = rewards.masked_fill(batch.of_samples(TEACHER_SAMPLED).bool(), 0.0)",
                "pass",
            ),
            ("divergences have no weight", "self.config.teacher_coef * divergence, {**", "divergence, {**"),
            ("one answer will do with rewards", "2 if config.reward_coef > 0 else 1", "1"),
            ("the data is unlearned", "+ self.config.data_coef * nll", "- self.config.data_coef * nll"),
        ],
    },
    "megarl/ops/divergence.py": {
        ("tests/kernels/test_divergence.py",): [
            ("beta is swapped in the mixture", "logp + math.log(beta)", "logp + math.log1p(-beta)"),
            (
                "the temperature is missing in the gradient",
                "grad.mul_(head.inv_temp)",
                "grad",
            ),
            ("the first column is never a label", "self.here = (self.place >= 0) &", "self.here = (self.place > 0) &"),
        ],
    },
    "megarl/algorithms/policy_gradient.py": {
        unit("algorithms/test_rl"): [
            ("entropy_coef never reaches the loss", "entropy_coef=config.entropy_coef", "entropy_coef=0.0"),
            (
                "the reward is put on the last token",
                "torch.where(mask, torch.arange(batch.total_tokens), -1)",
                "torch.arange(batch.total_tokens)",
            ),
            (
                "the weight counts sequences without a trained token",
                "return shares(data).sum()",
                "return torch.tensor(data.num_seqs)",
            ),
            (
                "kl_in is ignored by sequence rewards",
                'if self.needs_reference and self.base.kl_in == "reward":\n            rewards = rewards -',
                "if self.needs_reference:\n            rewards = rewards -",
            ),
            ("correction is ignored", "correction=config.correction,", 'correction="none",'),
            ("correction_high is ignored", "correction_high=config.correction_high", "correction_high=2.0"),
            (
                "a sample without a trained token stays in its group",
                'torch.where(untrained, -1 - torch.arange(batch.num_samples), batch.of_samples("group_ids"))',
                'batch.of_samples("group_ids")',
            ),
            ("prox_logp is thought needless with several minibatches", "config.n_minibatches > 1 or", "False or"),
        ],
    },
    "megarl/algorithms/correction.py": {
        unit("algorithms/test_rl"): [
            ("the geometric level is the product", 'if self.level == "sequence" else', "if True else"),
            (
                "untrained tokens veto",
                "segment_sum(vanishing.to(prox_logp.dtype), mask,",
                "segment_sum(vanishing.to(prox_logp.dtype), torch.ones_like(mask),",
            ),
            ("reject_high is ignored", "if self.reject_high > 0:\n", "if False:\n"),
        ],
    },
    "megarl/algorithms/base.py": {
        unit("algorithms/test_rl"): [
            (
                "sequences without a trained token count in the mean",
                "samples = shares(data).sum()",
                "samples = torch.tensor(data.num_seqs)",
            ),
            (
                "advantages outside the mask stay",
                'return spread.masked_fill(~batch["loss_mask"].bool(), 0.0)',
                "return spread",
            ),
        ],
        unit("algorithms/test_segments"): [
            ("a segment counts as a sample", 'if "sample_tokens" in data:', "if False:"),
            ("returns stop at a segment's end", "samples.diff() != 0", "samples.diff() != -9"),
        ],
    },
    "megarl/types.py": {
        unit("algorithms/test_segments"): [
            ("equal ids in two groups are one sample", "torch.stack((groups, ids), 1)", "torch.stack((ids, ids), 1)"),
            ("samples are in the order of their ids", "firsts.argsort(stable=True).argsort()[index]", "index"),
        ],
    },
    "megarl/algorithms/kl_penalty.py": {
        unit("algorithms/test_rl"): [
            ("k2 is doubled", "r.square() / 2", "r.square()"),
            ("k1 has the other sign", "return -r", "return r"),
        ],
    },
    "megarl/algorithms/dapo.py": {
        unit("algorithms/test_rl"): [
            ("the overlong penalty is never added", " + self.overlong_penalty(longest_answers(batch))", ""),
            (
                "dynamic sampling cannot be switched off",
                "return not self.config.dynamic_sampling or bool(",
                "return bool(",
            ),
        ],
    },
    "megarl/algorithms/ppo.py": {
        unit("algorithms/test_rl"): [
            ("dual_clip is ignored", "dual_clip=config.dual_clip", "dual_clip=None"),
            ("gamma is ignored", "gamma=self.config.gamma", "gamma=1.0"),
            ("value_clip is ignored", "bound = self.config.value_clip", "bound = 0.2"),
        ],
    },
    "megarl/algorithms/reinforce.py": {
        unit("algorithms/test_rl"): [
            ("baseline=false is ignored", "if self.config.baseline:", "if True:"),
            ("the ratio is clipped at 2", "clip_high=UNBOUNDED", "clip_high=1.0"),
        ],
    },
    "megarl/algorithms/reinforce_pp.py": {
        unit("algorithms/test_rl"): [
            (
                "group_baseline is ignored",
                "        if self.config.group_baseline:\n            centred",
                "        if False:\n            centred",
            ),
            ("gamma is ignored", "gamma=self.config.gamma)", "gamma=1.0)"),
        ],
    },
    "megarl/algorithms/gdpo.py": {
        unit("algorithms/test_rl"): [
            (
                "the weights of rewards are ignored",
                "torch.tensor(self.config.reward_weights or [1.0] * columns.shape[1])",
                "torch.ones(columns.shape[1]) if not self.config.reward_weights else torch.ones("
                "len(self.config.reward_weights))",
            ),
        ],
    },
}

ACTOR: Bugs = {
    "megarl/actor/model/heads.py": {
        unit("actor/test_temperature"): [
            ("the head ignores the temperature", '"temperature": settings.temperature', '"temperature": 1.0'),
        ],
        unit("actor/test_token_loss"): [
            ("logits are computed twice", "if trains and gradients is not None:", "if False:"),
            (
                "skipped_gradient is ignored",
                "config.float32_head, kept, config.skipped_gradient",
                "config.float32_head, kept, 0.0",
            ),
        ],
        unit("actor/test_kept_logits"): [
            ("free memory is asked for each time", "if self._bytes is None:", "if True:"),
            (
                "free memory is asked for once a run",
                "\n        self._bytes = None\n\n    def holds",
                "\n        pass\n\n    def holds",
            ),
        ],
    },
    "megarl/actor/batch/shared_prefix.py": {
        unit("actor/test_prefix_attention"): [
            ("the last page is shared too", "equal // PAGE * PAGE - PAGE", "equal // PAGE * PAGE"),
            ("a token is read by the last member that has it", "shared[member, :member]", "shared[member, member:]"),
            ("padding continues a sequence", "Segment(total, count, -1)", "Segment(total, count, 0)"),
            ("a unit counts the prompt again", "common[i, first:i].max(initial=0)", "common[i, i:i].max(initial=0)"),
        ],
    },
    "megarl/actor/model/attention/prefix.py": {
        unit("actor/test_prefix_attention"): [
            (
                "the outputs' weights are swapped",
                "torch.sigmoid(more_lse - part_lse)",
                "torch.sigmoid(part_lse - more_lse)",
            ),
            ("backward has each call's own log-sum-exp", "part_lse.copy_(torch.logaddexp(part_lse, more_lse))", "pass"),
            ("keys of ancestors get no gradient", "total.float().index_add_(0, ancestors, part.float())", "total"),
            (
                "only the parent is seen",
                "while (parent := segments[line[-1]].parent) >= 0:",
                "while (parent := -1) >= 0:",
            ),
            ("a part's longest query may be 1", "max(2, int(queries.max()))", "int(queries.max())"),
        ],
    },
    "megarl/actor/policy.py": {
        unit("actor/test_minibatches"): [
            (
                "minibatches are contiguous and the remainder is dropped",
                "(samples % count == first)",
                "(samples // (batch.num_samples // count) == first)",
            ),
            ("maxima are averaged", '(max if key.endswith("_max") else _mean)(', "_mean("),
            (
                "figures of skipped steps are averaged in",
                '[step for step in steps if not step["skipped_steps"]] or steps',
                "steps",
            ),
            (
                "skipped steps are not summed",
                'sum(step["skipped_steps"] for step in steps)',
                'steps[0]["skipped_steps"]',
            ),
        ],
    },
    "megarl/actor/supervised.py": {
        unit("actor/test_minibatches", "actor/test_engine"): [
            ("the weight counts first tokens", "mask[data.cu_seqlens[:-1][lengths > 0].long()] = False", "pass"),
        ],
    },
    "megarl/actor/model/moe.py": {
        unit("actor/test_moe_routing"): [
            ("pre-softmax is inverted", "not experts.normalized", "experts.normalized"),
            ("one expert fewer", '"moe_router_topk": experts.topk', '"moe_router_topk": experts.topk - 1'),
            ("routed experts are not scaled", "experts.scale if experts.scale != 1.0 else None", "None"),
        ],
        unit("actor/test_grouped_experts"): [
            ("the router has the model's dtype", '"moe_router_dtype": "fp32"', '"moe_router_dtype": None'),
        ],
    },
    "megarl/actor/weights/hf_weights.py": {
        unit("actor/test_grouped_experts"): [
            ("all grouped experts are the first", r'r"experts.\2.\3\1"', r'r"experts.\2.\g<3>0"'),
        ],
    },
    "megarl/actor/weights/block_fp8.py": {
        unit("actor/test_block_fp8"): [
            ("a cut block takes its neighbour's scale", "// edge - part.start // edge)", "// edge - part.start)"),
            ("the last ragged block is left out", "-(-part.stop // edge)", "part.stop // edge"),
            ("weights without scales are read as they are", 'get_dtype().startswith("F8_")', 'get_dtype() == "F8"'),
            ("damaged scales are multiplied in", "scales.isfinite() & (scales >= 0)", "scales == scales"),
        ],
    },
    "megarl/actor/weights/fused_experts.py": {
        unit("actor/test_fused_experts"): [
            ("gate and up are swapped", "part[self.turn :: step]", "part[1 - self.turn :: step]"),
        ],
    },
    "megarl/actor/model/attention/windows_and_sinks.py": {
        unit("actor/test_windows_and_sinks"): [
            ("a window sees one key more", "keys > queries[..., None] - window", "keys >= queries[..., None] - window"),
            ("sinks have no mark", "    mark_sinks(sinks)\n    return", "    return"),
        ],
    },
    "megarl/actor/weights/split_marks.py": {
        unit("actor/test_split_marks"): [
            ("a split parameter needs no mark", "if is_split and not is_marked:", "if False:"),
            ("a replicated parameter may bear the mark", "if is_marked and not is_split and", "if False and"),
            ("experts are compared by tp", "place.etp + shift", "place.etp"),
        ],
    },
    "megarl/actor/sizes/memory.py": {
        unit("actor/test_memory"): [
            ("one expert's gradient is counted for all", "if at_once else 1", "if False else 1"),
            ("an expert's input is not counted", "(hidden + tensors * width) * item", "(tensors * width) * item"),
        ],
    },
    "megarl/actor/health.py": {
        unit("actor/test_health_limits"): [
            (
                "a step more is skipped before the run ends",
                "if self.in_a_row > self.limit:",
                "if self.in_a_row > self.limit + 1:",
            ),
            ("a step fewer is skipped", "if self.in_a_row > self.limit:", "if self.in_a_row >= self.limit:"),
            ("skipped steps count in total", "self.in_a_row + 1 if skipped else 0", "self.in_a_row + int(skipped)"),
            ("buffers of experts are not scanned", "(*ddp.buffers, *ddp.expert_parallel_buffers)", "ddp.buffers"),
        ],
    },
    "megarl/actor/mtp.py": {
        unit("actor/test_mtp"): [
            ("the model gets gradients of later tokens", "output.detach()", "output"),
            (
                "the head gets gradients of later tokens",
                "heads.weight_of(self._last).detach(),",
                "heads.weight_of(self._last),",
            ),
            ("the loss is the sum of labels", ".sum() / max(depth.targets, 1)", ".sum() / 1"),
        ],
    },
    "megarl/actor/model/mtp.py": {
        unit("actor/test_mtp"): [
            (
                "the projection's inputs are swapped",
                "(self.enorm(embedded), self.hnorm(hidden))",
                "(self.hnorm(hidden), self.enorm(embedded))",
            ),
            ("the norm before the head is left out", "self.final_layernorm(out)", "out"),
            ("their gradients count in the model's norm", 'setattr(param, "grad_norm_group", NORM_GROUP)', "None"),
        ],
    },
    "megarl/actor/batch/microbatch.py": {
        unit("actor/test_mtp"): [
            ("a label crosses a sequence's end", "trained = source + 1 < ends", "trained = source < ends"),
            (
                "a token is read across a sequence's end",
                "masked_fill(source >= ends, 0)",
                "masked_fill(source > ends, 0)",
            ),
        ],
    },
    "megarl/actor/weights/repeated_tensors.py": {
        unit("actor/test_mtp"): [
            ("copies of the head are the embedding's", "EMBEDDING if model.tied else HEAD", "EMBEDDING"),
        ],
    },
    "megarl/actor/engine.py": {
        unit("actor/test_health_limits"): [
            (
                "gradients are not scanned",
                "math.isfinite(norm) and gradients_are_finite(self.ddps)",
                "math.isfinite(norm)",
            ),
            ("a loss that is not finite steps", "on_all_ranks(math.isfinite(loss) and", "on_all_ranks("),
        ],
        unit("actor/test_optimizer", "actor/test_engine"): [
            ("the scheduler steps twice", "self.scheduler.step(1)", "self.scheduler.step(2)"),
            ("weights of microbatches are not normalised", "weight / total, targets)", "weight, targets)"),
        ],
    },
    "megarl/actor/reports.py": {
        unit("actor/test_engine"): [
            ("maxima are weighted", 'value if name.endswith("_max") else counts', "counts"),
        ],
    },
}

DATA: Bugs = {
    "megarl/data/sft.py": {
        unit("data/test_sft_dataset"): [
            (
                "tokens of another tokenizer are read from the cache",
                'key = ["gsm8k sequences without thinking", instruction, tokenizer_identity(tokenizer)]',
                'key = ["gsm8k sequences without thinking", instruction]',
            ),
            (
                "tokens of another instruction are read from the cache",
                'key = ["gsm8k sequences without thinking", instruction, tokenizer',
                'key = ["gsm8k sequences without thinking", tokenizer',
            ),
            (
                "chats of another tokenizer are read from the cache",
                "key = [tokenizer_identity(tokenizer)]",
                "key = []",
            ),
        ],
    },
    "megarl/data/examples.py": {
        unit("data/test_examples"): [
            (
                "the mismatched completion is cut on the left",
                'row["mismatched_ids"][:limit]',
                'row["mismatched_ids"][-limit:]',
            ),
            ("the mismatched completion is the neighbour's", "(i + size // 2) % size", "(i + 1) % size"),
            (
                "a label counts per row, not per sequence",
                'torch.tensor([bool(row["kto_label"]) for row in rows]).repeat_interleave(2)',
                'torch.tensor([bool(row["kto_label"]) for row in rows]).repeat(2)',
            ),
            ("the length is of the first completion", "prompt + max(lengths)", "prompt + lengths[0]"),
        ],
        unit("data/test_preference_formats"): [
            (
                "pairs of another tokenizer are read from the cache",
                "paired, number, tokenizer_identity(tokenizer)]",
                "paired, number]",
            ),
        ],
    },
    "megarl/data/mixture.py": {
        unit("data/test_mixture"): [
            ("a repeated row gets a number of its own", "self._first[number] + row}", "index}"),
            (
                "a source without a row has no share",
                "rows, tokens = counts.get(label, (0, 0))",
                "rows, tokens = counts.get(label, (1, 1))",
            ),
            ("rewards are means of groups", "rewards_of_samples(group).sum()", "rewards_of_samples(group).mean()"),
        ],
    },
    "megarl/data/stream.py": {
        unit("data/test_stream"): [
            ("a resume begins its window again", 'self._at, self._used = state["at"]', "self._at, self._used = 0"),
            ("every window has one order", "self._rng(self._first + 1).shuffle", "self._rng(1).shuffle"),
            ("every epoch has one order", "{self.seed} {self.epoch} {position}", "{self.seed} {position}"),
            ("sources are drawn evenly", "range(len(self.parts)), self.weights", "range(len(self.parts))"),
        ],
    },
    "megarl/data/curriculum.py": {
        unit("data/test_curriculum"): [
            (
                "a prompt returns an epoch early",
                "self.config.revisit_epochs < epoch",
                "self.config.revisit_epochs <= epoch",
            ),
            ("a streak outlives a change of kind", "max(streak, 0) + 1", "abs(streak) + 1"),
            ("refused groups are not measured", "else episode.rewards", "else ()"),
            ("the teacher's samples are measured", "strict=True) if own]", "strict=True)]"),
            ("metrics of sources are lost", "        self.batches.observe(episodes)\n", ""),
            ("a resume forgets skipped prompts", 'self._read, self._skipped = saved["read"], saved["skipped"]', "pass"),
            ("prompts that never return end no search", "self.streak.zero_()", "pass"),
        ],
    },
    "megarl/data/decontaminate.py": {
        unit("data/test_decontaminate"): [
            ("colliding hashes are an overlap", "if shared in windows(", "if shared and windows("),
            ("instructions are overlaps", "counts <= max(COMMON_ROWS,", "counts <= len(texts) + max(COMMON_ROWS,"),
            ("report drops", "if not dropped:", "if False:"),
        ],
    },
    "megarl/data/prepare.py": {
        unit("data/test_prompts", "data/test_sft_dataset", "data/test_preference_formats"): [
            ("a row of exactly max_length is listed", "if n > max_length]", "if n >= max_length]"),
            ("a row of exactly max_length is dropped", "if n <= max_length]", "if n < max_length]"),
            (
                "a file is written for as many bad rows as fit the message",
                "if len(bad) > LISTED:",
                "if len(bad) >= LISTED:",
            ),
            ("one bad row fewer is listed", "bad[:LISTED]", "bad[: LISTED - 1]"),
        ],
    },
}
