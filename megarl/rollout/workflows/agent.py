"""Any agent as a workflow: client code talks to a local endpoint that speaks OpenAI's chat protocol.

    agent(base_url, api_key, data) --POST /v1/chat/completions--> proxy --> engine.agenerate
                                                                    |
                                                   records tokens, log-probs and versions

The endpoint is on 127.0.0.1 with a key for each episode. When a request repeats a conversation that the proxy has
answered before, its recorded tokens are used, and only the new turns are tokenised; so what is trained on is exactly
what the model saw and sampled. Every conversation that no other continues becomes one sequence.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from torch import Tensor

from megarl.rollout.api import InferenceEngine, RolloutWorkflow
from megarl.rollout.transcript import Transcript, pad_transcripts, prompt_ids, turn_ids
from megarl.types import GenerationHyperparameters, ModelRequest, RewardError

AgentFn = Callable[..., Any]  # (base_url: str, api_key: str, data: dict) -> reward, or an awaitable of one


@dataclass
class _Session:
    """One run of the agent: the conversations that it has had, by the messages they hold."""

    engine: InferenceEngine
    said: dict[str, Transcript] = field(default_factory=dict)  # messages as JSON -> tokens
    continued: set[str] = field(default_factory=set)


class AgentWorkflow(RolloutWorkflow):
    """Runs `agent_fn(base_url, api_key, data)` `gconfig.n_samples` times; what it returns is the reward.

    `agent_fn` is sync (it then runs in a thread) or async. Requests may set `temperature`, `max_tokens` and `stop`
    within what `gconfig` allows: a temperature other than the trainer's is refused, as its log-probs would not be the
    policy's.
    """

    def __init__(self, agent_fn: AgentFn, gconfig: GenerationHyperparameters, tokenizer: Any):
        self.agent_fn = agent_fn
        self.gconfig = gconfig
        self.tokenizer = tokenizer
        self._sessions: dict[str, _Session] = {}
        self._site: web.TCPSite | None = None
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Tensor] | None:
        url = await self._serve()
        done = await asyncio.gather(*(self._run(engine, data, url) for _ in range(self.gconfig.n_samples)))
        transcripts = [(transcript, reward) for group, reward in done for transcript in group]
        if not transcripts:
            return None
        return pad_transcripts([transcript for transcript, _ in transcripts], [reward for _, reward in transcripts])

    async def _run(
        self, engine: InferenceEngine, data: dict[str, Any], url: str
    ) -> tuple[list[Transcript], float | RewardError]:
        key = secrets.token_urlsafe(24)
        session = self._sessions[key] = _Session(engine)
        reward: float | RewardError
        try:
            if inspect.iscoroutinefunction(self.agent_fn):
                value = await self.agent_fn(url, key, dict(data))
            else:
                value = await asyncio.to_thread(self.agent_fn, url, key, dict(data))
            reward = float(value)
        except Exception as error:  # the agent is the user's: its sample is masked and counted
            reward = RewardError(f"the agent failed: {type(error).__name__}: {error}")
        finally:
            del self._sessions[key]
        return [t for messages, t in session.said.items() if messages not in session.continued], reward

    async def _serve(self) -> str:
        async with self._starting:
            if self._site is None:
                app = web.Application(client_max_size=64 * 2**20)
                app.router.add_post("/v1/chat/completions", self._complete)
                self._runner = web.AppRunner(app)
                await self._runner.setup()
                self._site = web.TCPSite(self._runner, "127.0.0.1", 0)
                await self._site.start()
        assert self._runner is not None
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def aclose(self) -> None:
        """Stops the endpoint."""
        if self._runner is not None:
            await self._runner.cleanup()
        self._runner, self._site = None, None

    async def _complete(self, request: web.Request) -> web.Response:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if key not in self._sessions:
            return _refusal(401, "this key belongs to no episode that is running")
        try:
            body = await request.json()
            messages = [dict(message) for message in body["messages"]]
        except (json.JSONDecodeError, KeyError, TypeError, ValueError):
            return _refusal(400, "the body is no chat completion request with messages")
        if problem := self._problem(body):
            return _refusal(400, problem)
        session = self._sessions[key]
        transcript = self._resume(session, messages)
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or self.gconfig.max_new_tokens
        stop = body.get("stop") or []
        gconfig = self.gconfig.new(
            n_samples=1,
            max_new_tokens=min(int(limit), self.gconfig.max_new_tokens),
            stop=[*self.gconfig.stop, *([stop] if isinstance(stop, str) else stop)],
        )
        asked = len(transcript.tokens)
        response = await session.engine.agenerate(ModelRequest(input_ids=list(transcript.tokens), gconfig=gconfig))
        transcript.sample(response)
        text = self.tokenizer.decode(response.output_tokens, skip_special_tokens=True)
        answer = {"role": "assistant", "content": text}
        session.said[_name([*messages, answer])] = transcript
        usage = {"prompt_tokens": asked, "completion_tokens": response.output_len}
        return web.json_response(
            {
                "id": f"chatcmpl-{secrets.token_hex(12)}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": str(body.get("model", "policy")),
                "choices": [{"index": 0, "message": answer, "finish_reason": response.stop_reason}],
                "usage": {**usage, "total_tokens": asked + response.output_len},
            }
        )

    def _problem(self, body: dict[str, Any]) -> str | None:
        if body.get("stream"):
            return "stream=true is not served; ask for whole completions"
        if body.get("n", 1) != 1:
            return "n must be 1: every completion is an episode of its own"
        if body.get("temperature", self.gconfig.temperature) != self.gconfig.temperature:
            return f"temperature must be gconfig.temperature={self.gconfig.temperature}, as the trainer's log-probs are"
        return None

    def _resume(self, session: _Session, messages: list[dict[str, Any]]) -> Transcript:
        """The tokens of the conversation: recorded ones as far as it was had before, the rest by the template."""
        for count in range(len(messages) - 1, 0, -1):
            name = _name(messages[:count])
            if name in session.said:
                session.continued.add(name)
                transcript = session.said[name].copy()
                transcript.give(turn_ids(self.tokenizer, transcript.tokens, messages[count:]))
                return transcript
        transcript = Transcript()
        transcript.give(prompt_ids(self.tokenizer, messages))
        return transcript


def _name(messages: list[dict[str, Any]]) -> str:
    """A conversation by what it says."""
    return json.dumps([[message.get("role"), message.get("content")] for message in messages])


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=status)
