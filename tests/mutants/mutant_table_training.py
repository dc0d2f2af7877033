"""Bugs written by hand in algorithms, the actor and the data."""

from __future__ import annotations

from mutant import Bugs, unit

ALGORITHMS: Bugs = {
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
                "return (trained_tokens(data) > 0).sum()",
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
                'torch.where(untrained, -1 - torch.arange(batch.num_seqs), batch["group_ids"])',
                'batch["group_ids"]',
            ),
            ("prox_logp is thought needless with several minibatches", "config.n_minibatches > 1 or", "False or"),
        ],
    },
    "megarl/algorithms/base.py": {
        unit("algorithms/test_rl"): [
            (
                "sequences without a trained token count in the mean",
                "sequences = (lengths > 0).sum().clamp(min=1)",
                "sequences = torch.tensor(len(lengths))",
            ),
            (
                "advantages outside the mask stay",
                'return spread.masked_fill(~batch["loss_mask"].bool(), 0.0)',
                "return spread",
            ),
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
            ("the overlong penalty is never added", " + self.overlong_penalty(trained_tokens(batch))", ""),
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
            (
                "the head in chunks ignores the temperature",
                "temperature=temperature,\n            group=group,\n            with_entropy=with_entropy,\n"
                "            rows=rows,",
                "temperature=1.0,\n            group=group,\n            with_entropy=with_entropy,\n"
                "            rows=rows,",
            ),
            (
                "the head at once ignores the temperature",
                "temperature=temperature,\n        group=group,",
                "temperature=1.0,\n        group=group,",
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
    "megarl/actor/model/prefix_attention.py": {
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
                "range(first, batch.num_seqs, count)",
                "range(first * (batch.num_seqs // count), (first + 1) * (batch.num_seqs // count))",
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
        ],
        unit("actor/test_grouped_experts"): [
            ("the router has the model's dtype", '"moe_router_dtype": "fp32"', '"moe_router_dtype": None'),
        ],
    },
    "megarl/actor/weights/hf_weights.py": {
        unit("actor/test_grouped_experts"): [
            ("all grouped experts are the first", r'r"experts.\2.weight\1"', r'r"experts.\2.weight0"'),
        ],
    },
    "megarl/actor/weights/split_marks.py": {
        unit("actor/test_split_marks"): [
            ("a split parameter needs no mark", "if is_split and not is_marked:", "if False:"),
            ("a replicated parameter may bear the mark", "if is_marked and not is_split and", "if False and"),
            ("experts are compared by tp", "place.etp + shift", "place.etp"),
        ],
    },
    "megarl/actor/memory.py": {
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
            ("weights of microbatches are not normalised", "weight / total,", "weight,"),
            ("maxima are weighted", 'v if k.endswith("_max") else weight * v', "weight * v"),
        ],
    },
}

DATA: Bugs = {
    "megarl/data/sft.py": {
        unit("data/test_sft_dataset"): [
            (
                "tokens of another tokenizer are read from the cache",
                'key = ["gsm8k sequences", instruction, tokenizer_identity(tokenizer)]',
                'key = ["gsm8k sequences", instruction]',
            ),
            (
                "tokens of another instruction are read from the cache",
                'key = ["gsm8k sequences", instruction, tokenizer',
                'key = ["gsm8k sequences", tokenizer',
            ),
            (
                "chats of another tokenizer are read from the cache",
                '["chats", tokenizer_identity(tokenizer)]',
                '["chats"]',
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
    "megarl/data/collate.py": {
        unit("data/test_collate"): [
            ("orders repeat along seed + epoch", "self.seed * 1_000_003 + self.epoch", "self.seed + self.epoch"),
            (
                "the loader draws from the global generator",
                "generator=torch.Generator().manual_seed(config.seed),",
                "generator=None,",
            ),
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
