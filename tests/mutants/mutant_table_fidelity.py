"""Bugs written by hand in what keeps training to the samples: routes, quantised weights, corrections, equal bits,
replays and comparisons."""

from __future__ import annotations

from mutant import Bugs, unit

REPLAYED = "tests/distributed/test_replayed_experts.py::test_given_experts_are_computed_as_in_transformers"
QUANTISE = ("tests/kernels/test_quantize.py",)
ROW_INVARIANT = ("tests/kernels/test_row_invariant.py",)
DETERMINISTIC = ("tests/e2e/test_deterministic_servers.py",)

ROUTES: Bugs = {
    "megarl/actor/model/moe.py": {
        ("tests/te/test_fusions.py",): [
            ("the kernel of routing sees NaN", "            logits.data.nan_to_num_()", "            pass"),
            ("routing is never fused", "fused_routing and fits_fused_routing(experts)", "False"),
            ("routing is fused for all experts", "fused_routing and fits_fused_routing(experts)", "fused_routing"),
            ("permutation is never fused", '"moe_permute_fusion": fused_permutation', '"moe_permute_fusion": False'),
        ],
    },
    "megarl/actor/model/backends.py": {
        ("tests/te/test_fusions.py",): [
            ("routers of te are Megatron's", "        router=FusedRouter,", "        router=TopKRouter,"),
            ("te does not fuse routing", "        fused_routing=True,\n", ""),
        ],
    },
    "megarl/actor/model/routing.py": {
        ("tests/te/test_fusions.py",): [
            ("routing is fused where a choice is replayed", "backend, fused_routing=False)", "backend)"),
        ],
        unit("actor/test_given_experts"): [
            (
                "weights are those of its own choice",
                "            self.waiting.append(experts)\n        return scores.gather(1, experts), experts",
                "            self.waiting.append(experts)\n        return chosen_scores, experts",
            ),
            ("expert 0 first means no route", "given = self.replayed[:, :1] >= 0", "given = self.replayed[:, :1] > 0"),
            ("the router's own choice is recorded", "self.chosen = experts", "self.chosen = chosen"),
            ("passes without backward keep choices", "self.recomputes and self.trains", "self.recomputes"),
            ("choices of a failed pass stay", "            router.waiting.clear()\n", "            pass\n"),
            ("backward replays the last microbatch", "                router.replayed = None", "                pass"),
            ("each layer has the routes of the one before", "part[:, layer].long()", "part[:, layer - 1].long()"),
            ("dense layers count", "order.index(router.layer_number)", "router.layer_number - 1"),
            ("a sequence's last token needs a route", "position < last[owner]", "position <= last[owner]"),
            ("an absent expert passes", "((routes < 0) | (routes >= self.experts.count))", "(routes < 0)"),
            ("a route in one layer is enough", ".flatten(1).any(1)", ".flatten(1).all(1)"),
            (
                "routes of another model pass",
                "routes.shape[1:] != (self.layers, topk)",
                "routes.shape[2:] != (topk,)",
            ),
            (
                "untrained tokens need routes",
                'batch["loss_mask"].bool() if "loss_mask" in batch else',
                "torch.ones(batch.total_tokens).bool() if True else",
            ),
            (
                "another order counts as a change",
                "(experts.sort(-1).values != chosen.sort(-1).values).any(-1)",
                "(experts != chosen).any(-1)",
            ),
            ("choices are counted again", "            router.counts.clear()\n", ""),
        ],
        (f"{REPLAYED}[2-pp2-qwen3_5_moe]",): [
            ("backward takes the newest choice", "self.waiting.popleft()", "self.waiting.pop()"),
            (
                "one stage's choices are recorded",
                "for group in (self.groups.dp, self.groups.pp):",
                "for group in (self.groups.dp,):",
            ),
        ],
        (f"{REPLAYED}[2-tp2sp-qwen3_5_moe]",): [
            (
                "all ranks replay the first rows",
                "self.groups.tp_rank if self.splits > 1 else 0",
                "0",
            ),
            ("parts of the rows are recorded in reverse", "rows = torch.cat(parts)", "rows = torch.cat(parts[::-1])"),
        ],
        (f"{REPLAYED}[2-ep2-gpt_oss]",): [
            ("a rank's own choices are counted", "            dist.all_reduce(counts)\n", "            pass\n"),
        ],
    },
    "megarl/actor/policy.py": {
        unit("actor/test_given_experts"): [
            (
                "selective recomputation chooses anew",
                'how == "full" or (how == "selective" and "moe" in modules)',
                'how == "full"',
            ),
            (
                "proximal keeps the batch's routes",
                "            batch.tokens.pop(ROUTED_EXPERTS, None)\n",
                "",
            ),
            (
                "updates go without routes",
                "        self._check_routes(batch)\n        stats = self._update(batch)",
                "        stats = self._update(batch)",
            ),
        ],
    },
    "megarl/actor/batch/shared_prefix.py": {
        unit("actor/test_given_experts"): [
            ("prompts are shared over other routes", "if ROUTED_EXPERTS not in batch.tokens:", "if True:"),
        ],
    },
    "megarl/rollout/client/routes.py": {
        unit("rollout/test_routes"): [
            ("the first layers are kept", "routes[:, list(self.sparse)]", "routes[:, : len(self.sparse)]"),
            ("one expert too many passes", "high >= self.experts:", "high > self.experts:"),
            ("only neighbours may not repeat", "ordered = routes.sort(-1).values", "ordered = routes"),
            ("a later pass takes over the prompt", "return torch.cat((routes, later[len(routes) :]))", "return later"),
            ("a later part without routes drops all", "return routes if later is None else later", "return later"),
        ],
    },
    "megarl/rollout/client/requests.py": {
        unit("rollout/test_routes"): [
            (
                "the token before an interruption keeps its route",
                "                self.routes = self.routes[:-1]\n",
                "                pass\n",
            ),
        ],
    },
    "megarl/rollout/transcript.py": {
        unit("rollout/test_routes"): [
            ("unread tokens have expert 0", "longest, *known.shape[1:]), -1)", "longest, *known.shape[1:]), 0)"),
            (
                "a turn's routes are appended whole",
                "self.routes = continued(self.routes, response.routed_experts)",
                "self.routes = response.routed_experts",
            ),
        ],
    },
    "megarl/served_checks.py": {
        unit("test_checks"): [
            ("dense layers of the servers do not matter", "        if here != there:\n", "        if here > there:\n"),
            ("caches without routes pass", '    "enable_hierarchical_cache": False,\n', ""),
        ],
    },
}

QUANTISED: Bugs = {
    "megarl/ops/quantize.py": {
        QUANTISE: [
            ("the last part of a block has no scale", "-(-shape[1] // block[1])", "shape[1] // block[1]"),
            (
                "blocks have their neighbour's scale",
                "scales = scales.repeat_interleave(",
                "scales = scales.roll(1, dim).repeat_interleave(",
            ),
            (
                "products are of rounded scales",
                "(values.float() * scales).to(dtype)",
                "(values.to(dtype) * scales.to(dtype))",
            ),
            ("rows of zeros have no least scale", "largest.clamp(min=LEAST)", "largest"),
        ],
    },
    "megarl/families/weight_formats.py": {
        unit("reshard/test_quantised_plan"): [
            ("shared experts stay plain", r"(?:experts\.\d+\.|shared_experts\.)?", r"(?:experts\.\d+\.)?"),
            ("the second latent projection stays plain", "|q_[ab]_proj|", "|q_a_proj|"),
            ("rows are cut inside a block", "-(-rows // down), 1 if", "rows // down, 1 if"),
        ],
    },
    "megarl/reshard/quantised_weights.py": {
        unit("reshard/test_quantised_plan"): [
            ("ranks add their largest weights", "dist.ReduceOp.MAX", "dist.ReduceOp.SUM"),
            (
                "only attention shares its rows",
                'name.endswith(("o_proj.weight", "down_proj.weight"))',
                'name.endswith("o_proj.weight")',
            ),
            ("negative weights do not count", "[1].abs().amax(dim=1)", "[1].amax(dim=1)"),
        ],
        unit("actor/test_quantization_aware"): [
            (
                "passes round by other scales than syncs",
                "values = dequantise(self.format, pieces, weight.dtype)",
                "values = dequantise(self.format, [pieces[0], pieces[1] * 2], weight.dtype)",
            ),
        ],
    },
    "megarl/reshard/plan/quantised.py": {
        unit("reshard/test_quantised_plan"): [
            ("a ragged last block has no scale", "last.append(-(-stop // block))", "last.append(stop // block)"),
            ("gaps in a weight pass", ".sum() != np.prod(stop - start)", ".sum() > np.prod(stop - start)"),
            (
                "a parameter's scales have its shape turned",
                "*piece.shape(rows, columns))",
                "*piece.shape(columns, rows))",
            ),
        ],
    },
    "megarl/actor/weights/quantised.py": {
        unit("actor/test_quantised_base"): [
            (
                "scales of later rows land on the first",
                "self.scales[rows] = scales",
                "self.scales[: len(scales)] = scales",
            ),
            (
                "rows are read by the first scales",
                "self.scales[rows], self.kind",
                "self.scales[: len(self.codes[rows])], self.kind",
            ),
            ("cuts inside a block pass", "if (high - low) % BLOCK:", "if low % BLOCK:"),
        ],
    },
}

CORRECTIONS: Bugs = {
    "megarl/algorithms/correction.py": {
        unit("algorithms/test_rl"): [
            (
                "sequences have geometric weights",
                'if self.level == "sequence" else',
                'if self.level != "sequence" else',
            ),
            ("the veto is a log-ratio", "< math.log(self.veto)", "< -self.veto"),
            (
                "masked tokens can veto",
                "(vanishing.to(prox_logp.dtype), mask,",
                "(vanishing.to(prox_logp.dtype), mask | True,",
            ),
            ("sequences above the bound stay", "kept &= mean_weight <= self.reject_high", "pass"),
            (
                "sequences are judged by their sum",
                "mean_weight = (sums[:, 0] / sums[:, 1].clamp(min=1)).exp()",
                "mean_weight = sums[:, 0].exp()",
            ),
            (
                "prompt tokens count",
                'data["loss_mask"].bool(), data.cu_seqlens)',
                'data["loss_mask"] >= 0, data.cu_seqlens)',
            ),
        ],
    },
}

DETERMINISM: Bugs = {
    "megarl/ops/row_invariant.py": {
        ROW_INVARIANT: [
            (
                "few rows are multiplied as they are",
                "F.pad(rows, (0, 0, 0, -len(rows) % BLOCK_ROWS)).split",
                "rows.split",
            ),
            (
                "few columns are multiplied as they are",
                "    column_blocks[-1] = F.pad(column_blocks[-1], (0, 0, 0, -columns % BLOCK_COLUMNS))\n",
                "",
            ),
            (
                "summands are added in order",
                "zip(terms[::2], terms[1::2], strict=True)]",
                "zip(terms[:1], terms[1:2], strict=True)] + list(terms[2:])",
            ),
            (
                "halves are added",
                "zip(terms[::2], terms[1::2], strict=True)]",
                "zip(terms[: len(terms) // 2], terms[len(terms) // 2 :], strict=True)]",
            ),
            ("a vector's tail rounds otherwise", "F.silu(F.pad(flat, (0, -len(flat) % LANES)))", "F.silu(flat)"),
            ("padding of keys is seen", "(0, key_padding), value=True)", "(0, key_padding), value=False)"),
            (
                "blocks of keys are added by torch",
                "total, out = total + sums[i], out + products[i]",
                "total, out = sums.sum(0), products.sum(0)",
            ),
            ("one query is multiplied alone", "-rows % MIN_ROWS, -key", "0, -key"),
        ],
    },
    "megarl/actor/model/deterministic_layers.py": {
        unit("actor/test_deterministic"): [
            (
                "weights are of all experts",
                "not self.config.moe_router_pre_softmax)",
                "self.config.moe_router_pre_softmax)",
            ),
        ],
        ("tests/distributed/test_deterministic_layouts.py",): [
            ("a rank adds all summands", "max(1, summands // self.tp_group.size())", "max(1, summands)"),
        ],
    },
    "megarl/cpu/sglang_models/deterministic.py": {
        DETERMINISTIC: [
            (
                "every rank has the experts' sum",
                "return total if layer.moe_tp_rank == 0 else torch.zeros_like(total)",
                "return total",
            ),
            (
                "experts are added as they were chosen",
                "    for choice in range(1, ids.shape[1]):",
                "    for choice in range(ids.shape[1] - 1, 0, -1):",
            ),
        ],
    },
}

REPLAYS: Bugs = {
    "megarl/trainer/replay/kept_batches.py": {
        unit("trainer/test_kept_batches"): [
            ("a step that is taken anew stays", "if later > step:", "if later > step + 1:"),
            ("the ring has one batch more", "len(paths) >= self._most", "len(paths) > self._most"),
            ("the newest batches go", "paths.pop(0).unlink()", "paths.pop().unlink()"),
            ("the new batch does not count", "sum(sizes) + size > self._most_bytes", "sum(sizes) > self._most_bytes"),
            ("facts may change", "digest = hashlib.sha256(text.encode())", "digest = hashlib.sha256()"),
            (
                "a resume is another configuration",
                "replace(config, resume=None, run_root=",
                "replace(config, run_root=",
            ),
        ],
    },
    "megarl/trainer/replay/source.py": {
        unit("trainer/test_kept_batches", "trainer/test_replayed_steps"): [
            ("the state after the step serves", "if first - 1 <= number < step]", "if first - 1 <= number <= step]"),
            ("the oldest state is taken", "start = max(starts)", "start = min(starts)"),
            ("the state's own step is taken again", "range(start + 1, step + 1)", "range(start, step + 1)"),
            ("configurations may differ", "and replace(before, step=step) == own:", "and before is not own:"),
        ],
    },
    "megarl/trainer/replay/steps.py": {
        unit("trainer/test_replayed_steps"): [
            (
                "only the actor's state is loaded",
                "engine.load_state(Path(order.state) / name)",
                'name == "actor" and engine.load_state(Path(order.state) / name)',
            ),
            (
                "only weights are compared",
                'for kind in ("weight", "main", "exp_avg", "exp_avg_sq"):',
                'for kind in ("weight", "main"):',
            ),
        ],
    },
}

COMPARISONS: Bugs = {
    "megarl/trainer/replay/drift.py": {
        unit("trainer/test_drift"): [
            (
                "the smallest gaps are shown",
                "argsort(descending=True, stable=True)",
                "argsort(descending=False, stable=True)",
            ),
            (
                "one expert in common is agreement",
                "other[EXPERTS + number]).all(dim=1)",
                "other[EXPERTS + number]).any(dim=1)",
            ),
            ("errors are absolute", " / mine.norm(dim=1).clamp(min=1e-30)", ""),
            (
                "positions count over the batch",
                "(torch.arange(batch.total_tokens) - starts)[index]",
                "torch.arange(batch.total_tokens)[index]",
            ),
            ("a range leaves out its last position", "(position < first + width)", "(position < first + width - 1)"),
        ],
    },
    "megarl/actor/layer_states.py": {
        unit("trainer/test_drift"): [
            ("all layers have the first microbatch's rows", "microbatches[len(kept)]", "microbatches[0]"),
        ],
    },
}

FIDELITY: tuple[Bugs, ...] = (ROUTES, QUANTISED, CORRECTIONS, DETERMINISM, REPLAYS, COMPARISONS)
