"""`rollout_func(model, processing_class, prompts, generation_config) -> list[str]`, as TRL and axolotl have it.

The function drives a model by `model.generate(input_ids=..., max_new_tokens=...)` and returns the completions' texts.
A text may be assembled from many calls, so it is tokenised again as one completion. Its behaviour log-probs are
unknown; the trainer uses its own log-probs from before the update in their place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

import torch
from torch import Tensor

from megarl.knobs import UserError
from megarl.rollout.api import InferenceEngine, RolloutWorkflow
from megarl.rollout.reward_call import RewardFn, call_reward
from megarl.rollout.together import together
from megarl.rollout.transcript import Transcript, pad_transcripts, prompt_ids
from megarl.types import GenerationHyperparameters, ModelRequest, ModelResponse

RolloutFunc = Callable[..., list[str]]


class GeneratingModel:
    """Stands in for the model in the function: `generate` on the rollout servers, and `device`."""

    def __init__(self, engine: InferenceEngine, gconfig: GenerationHyperparameters, loop: asyncio.AbstractEventLoop):
        self.device = torch.device("cpu")
        self._engine = engine
        self._gconfig = gconfig
        self._loop = loop
        self._asking: set[Future[Any]] = set()
        self._has_ended = False

    def end(self) -> None:
        """Cancels requests under way and refuses later ones: the thread of an episode cannot be cancelled itself."""
        self._has_ended = True
        for future in list(self._asking):
            future.cancel()

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        max_new_tokens: int | None = None,
        generation_config: Any = None,
        **unknown: Any,
    ) -> Tensor:
        """int64 `[batch, longest]`: prompt and completion of each row, padded on the right with 0."""
        if unknown:
            raise UserError(f"model.generate: {sorted(unknown)} cannot be passed on; use max_new_tokens, and gconfig.*")
        limit = max_new_tokens or getattr(generation_config, "max_new_tokens", None) or self._gconfig.max_new_tokens
        gconfig = self._gconfig.new(n_samples=1, max_new_tokens=limit)
        keep = attention_mask.bool() if attention_mask is not None else torch.ones_like(input_ids, dtype=torch.bool)
        requests = [
            ModelRequest(input_ids=row[k].tolist(), gconfig=gconfig) for row, k in zip(input_ids, keep, strict=True)
        ]

        async def ask() -> list[ModelResponse]:
            return await together(self._engine.agenerate(request) for request in requests)

        if self._has_ended:
            raise CancelledError("the episode has ended")
        asking = asyncio.run_coroutine_threadsafe(ask(), self._loop)
        self._asking.add(asking)
        if self._has_ended:  # meanwhile
            asking.cancel()
        try:
            responses = asking.result()
        finally:
            self._asking.discard(asking)
        rows = [
            torch.cat([row, torch.tensor(r.output_tokens, dtype=row.dtype)])
            for row, r in zip(input_ids, responses, strict=True)
        ]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


class ProcessingClass:
    """The tokenizer as the function gets it. Chat templates may be rendered as axolotl's page does.

    `apply_chat_template(messages, processing_class=False)` there means `tokenize=False`: the text of the chat.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._tokenizer(*arguments, **options)

    def apply_chat_template(self, conversation: Any, *arguments: Any, **options: Any) -> Any:
        """Renders a chat as the tokenizer does, also with `processing_class` in place of `tokenize`."""
        if "processing_class" in options:
            options["tokenize"] = options.pop("processing_class")
        return self._tokenizer.apply_chat_template(conversation, *arguments, **options)


class RolloutFuncWorkflow(RolloutWorkflow):
    """Calls `rollout_func` for `gconfig.n_samples` completions of `data["messages"]` and scores them."""

    def __init__(
        self, rollout_func: RolloutFunc, reward_fn: RewardFn, gconfig: GenerationHyperparameters, tokenizer: Any
    ):
        self.rollout_func = rollout_func
        self.reward_fn = reward_fn
        self.gconfig = gconfig
        self.tokenizer = tokenizer

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Tensor]:
        model = GeneratingModel(engine, self.gconfig, asyncio.get_running_loop())
        prompts = [{"messages": data["messages"]} for _ in range(self.gconfig.n_samples)]
        processing_class = ProcessingClass(self.tokenizer)
        try:
            texts = await asyncio.to_thread(self.rollout_func, model, processing_class, prompts, None)
        finally:
            model.end()
        if len(texts) != len(prompts) or not all(isinstance(text, str) for text in texts):
            kinds = ", ".join(sorted({type(text).__name__ for text in texts})) or "nothing"
            raise UserError(
                f"rollout_func must return {len(prompts)} strings, one a prompt; it returned {len(texts)} ({kinds})"
            )
        prompt = prompt_ids(self.tokenizer, data["messages"])
        ids = [[*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id] for text in texts]
        rewards = await call_reward(self.reward_fn, self.tokenizer.decode(prompt), prompt, texts, ids, data)
        version = engine.get_version()
        transcripts = []
        for tokens in ids:
            transcript = Transcript()
            transcript.give(prompt)
            transcript.sample(ModelResponse(prompt, tokens, [0.0] * len(tokens), [version] * len(tokens)))
            transcripts.append(transcript)
        padded = pad_transcripts(transcripts, rewards)
        del padded["rollout_logprobs"]  # unknown
        return padded
