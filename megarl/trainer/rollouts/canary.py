"""Compares each server's log-probs of a few tokens with the trainer's, right after a weight sync.

Digests prove the parameters of a server, not that it computes with them. A CUDA graph may read an old buffer (SGLang
#27140, NeMo-RL #2895), and a prefix cache or a derived copy of a weight may outlive the weights.

The probe is a request of its own, and not the first training batch, for three reasons:

- Only tokens of the trainer's own version can be compared. A batch of an asynchronous run has few or none of these.
- It names the faulty server without a record of who sampled what, before the batch costs a forward pass.
- Rollouts need not wait: they start before it, and their answers are withheld until the verdict (`Router.hold`). So a
  server that is left out has contributed no token of the version, and its requests are asked again elsewhere.

The probe samples several tokens for a stale graph to show, as only decode steps replay graphs. It runs beside the
rollouts, so its decode steps have their batch sizes. It costs the trainer one forward pass of `reshard.canary_prompts`
sequences for each server, while the servers sample.

Co-located servers have the trainer's memory when they answer. There the comparison waits for the trainer's turn, after
the batch is sampled and before it is used.

The prompts are the same at every sync: caches that outlived their weights are then hit.

Bounds, in nats: with 16-bit weights, trainer and server round differently and log-probs differ by about 0.01. The
spacing of bfloat16 is 0.125 for logits of 16 to 32, hence a few tenths for single tokens. The default bounds leave a
factor of about 10 on the mean and 3 on the worst token. In float32 the difference is below 1e-4. A server that is one
step behind at a learning rate of 1e-6 stays below the noise of 16 bits, and is found once its lag has grown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megarl.config import Config
from megarl.data.templates import prompt_ids
from megarl.observe.metrics import stats_tracker
from megarl.parallel.broadcast import broadcast_batch, broadcast_json
from megarl.rollout.api import GenerationError
from megarl.rollout.client.sglang_client import RemoteSGLangEngine
from megarl.rollout.transcript import pad_responses
from megarl.trainer.inputs import Inputs
from megarl.types import ModelResponse, PackedBatch


@dataclass(frozen=True)
class Answers:
    """Completions of the servers that can be compared, and the faults of the others, by address."""

    responses: dict[str, list[ModelResponse]]
    faults: dict[str, str]

    def batch(self) -> PackedBatch | None:
        """All completions, server by server; None without any."""
        responses = [response for server in self.responses.values() for response in server]
        if not responses:
            return None
        batch = PackedBatch.from_padded(pad_responses(responses, [0.0] * len(responses)))
        batch.set_sequences("group_ids", torch.arange(len(responses)))  # actor.shared_prefix needs some
        return batch


class Canary:
    """The check of a run. Every rank has one; rank 0 asks the servers, all ranks compute log-probs."""

    def __init__(self, config: Config, inputs: Inputs) -> None:
        self.config = config.reshard
        self.enabled = self.config.canary_prompts > 0
        self._exact = config.determinism.same_bits
        self._inputs = inputs
        # Sampled from the whole tempered distribution, whose log-probs the trainer computes.
        self._gconfig = config.gconfig.new(
            n_samples=1,
            max_new_tokens=min(self.config.canary_tokens, config.gconfig.max_new_tokens),
            min_new_tokens=0,
            greedy=False,
            top_p=1.0,
            top_k=-1,
            stop=[],
            stop_token_ids=[],
        )

    def prompts(self, longest: int | None) -> list[list[int]]:
        """The first prompts of the training data, at most `longest` tokens with their completions."""
        assert self._inputs.train is not None, "rank 0 has the data"
        rows = self._inputs.train.examples
        count = min(self.config.canary_prompts, len(rows))
        most = None if longest is None else max(longest - self._gconfig.max_new_tokens, 1)
        messages = [rows[i]["messages"] for i in range(count)]
        return [prompt_ids(self._inputs.tokenizer, chat)[:most] for chat in messages]

    def ask(self, engine: RemoteSGLangEngine, servers: Sequence[str], version: int) -> Answers:
        """Has each of `servers`, which serve `version`, complete the prompts. Rank 0 calls it."""
        prompts = self.prompts(engine.max_sequence_tokens)
        responses: dict[str, list[ModelResponse]] = {}
        faults: dict[str, str] = {}
        for address, answer in engine.probe(servers, prompts, self._gconfig).items():
            fault = str(answer) if isinstance(answer, GenerationError) else self._fault(answer, version)
            if fault:
                faults[address] = f"server {address} does not answer the canary of version {version}: {fault}"
            elif not isinstance(answer, GenerationError):
                responses[address] = answer
        return Answers(responses, faults)

    def _fault(self, responses: Sequence[ModelResponse], version: int) -> str:
        """Reason why the trainer cannot score these completions, "" if it can."""
        if not all(response.output_len for response in responses):
            return "a completion is empty"
        if others := {v for response in responses for v in response.output_versions} - {version}:
            return f"its tokens are of version {', '.join(map(str, sorted(others)))}"
        last = max(token for response in responses for token in response.output_tokens)
        if last >= self._inputs.model.vocab_size:
            return f"it samples token {last}, outside the vocabulary of {self._inputs.model.vocab_size}"
        return ""

    def compare(self, answers: Answers | None, actor: Any, version: int) -> dict[str, str]:
        """Compares the completions with the log-probs of `actor`, whose weights are `version`. A collective.

        Returns what is wrong with servers beyond the bounds, by address, on rank 0. Other ranks pass no answers.
        """
        batch = answers.batch() if answers is not None else None
        if not broadcast_json(batch is not None):
            return dict(answers.faults) if answers is not None else {}
        batch = broadcast_batch(batch)
        logprobs = actor.compute_logp(batch)
        if answers is None:
            return {}
        gaps = (logprobs - batch["rollout_logprobs"]).abs().double().split(batch.lengths.tolist())
        sampled = batch["loss_mask"].split(batch.lengths.tolist())
        wrong, start = dict(answers.faults), 0
        for address, responses in answers.responses.items():
            own = range(start, start := start + len(responses))
            gap = torch.cat([gaps[i][sampled[i]] for i in own])
            mean, worst = float(gap.mean()), float(gap.max())
            stats_tracker.scalar(canary_logprob_diff_mean=mean, canary_logprob_diff_max=worst)
            if not self._within(mean, worst):
                wrong[address] = self._describe(address, version, gap.numel(), mean, worst)
        return wrong

    def _within(self, mean: float, worst: float) -> bool:
        """True if both are within their bounds, where 0 means no bound. NaN never is."""
        if self._exact:
            return worst == 0
        bounds = ((mean, self.config.max_logprob_diff), (worst, self.config.max_token_logprob_diff))
        return all(value <= (bound or float("inf")) for value, bound in bounds)

    def _describe(self, address: str, version: int, count: int, mean: float, worst: float) -> str:
        config = self.config
        bounds = (
            f"reshard.max_logprob_diff={config.max_logprob_diff:g} on average and "
            f"reshard.max_token_logprob_diff={config.max_token_logprob_diff:g} for one token are allowed"
        )
        if self._exact:
            bounds = "deterministic=true allows 0"
        return (
            f"server {address} does not compute what the trainer does: at version {version}, log-probs of {count} "
            f"tokens differ by {mean:.3g} on average and {worst:.3g} at worst, and {bounds}; a stale CUDA graph or "
            "cache needs a restart of the server, else compare dtypes and SGLang's arguments, or raise the bounds"
        )
