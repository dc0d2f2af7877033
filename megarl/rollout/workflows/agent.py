"""Any agent as a workflow: client code talks to a local endpoint that speaks OpenAI's chat protocol.

    agent(base_url, api_key, data) --POST /v1/chat/completions--> proxy --> engine.agenerate
                                                                    |
                                                   records tokens, log-probs and versions

The endpoint is on 127.0.0.1 with a key for each run of the agent. A request may continue a conversation that the proxy
has answered before. Then its recorded tokens are used and only the new turns are tokenised, so training sees exactly
the tokens that the model saw and sampled. Where the chat template rewrites earlier turns, another segment begins
(`rollout/conversation.py`). The segments of all conversations of a run are one sample; each answer is trained on once.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import logging
import secrets
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from torch import Tensor

from megarl.knobs import MAX_SECONDS, UserError, check_ranges, function_of, knob
from megarl.rollout.api import GenerationError, InferenceEngine, RequestRefused, RolloutWorkflow
from megarl.rollout.conversation import ChatTemplate, Conversation
from megarl.rollout.reward_call import is_async
from megarl.rollout.together import together
from megarl.rollout.transcript import Transcript, pad_samples
from megarl.types import GenerationHyperparameters, Reward, RewardError

logger = logging.getLogger(__name__)

AgentFn = Callable[..., Any]  # (base_url: str, api_key: str, data: dict) -> reward, or an awaitable of one
CLOSE_S = 1.0  # requests under way get this long when the endpoint stops
MAX_BODY = 64 * 2**20  # bytes


@dataclass(frozen=True)
class AgentConfig:
    """An agent of your own that asks the policy by OpenAI's chat protocol."""

    function: str = knob("", "MODULE.FUNCTION of your own: f(base_url, api_key, data) -> reward, sync or async")
    time_limit_s: float = knob(
        300.0, "seconds that one run of the function may take; then its sample is masked", above=0, most=MAX_SECONDS
    )
    max_threads: int = knob(
        64, "runs of a sync function at once; an async function has no such limit", least=1, most=4096
    )

    def __post_init__(self) -> None:
        check_ranges(self, "rollout.agent")

    def check(self) -> None:
        """Refuses an agent without a function.

        Raises:
            UserError: none is named.
        """
        if not self.function:
            raise UserError("rollout.workflow=agent needs rollout.agent.function=MODULE.FUNCTION of your own")


def agent_of(config: AgentConfig) -> AgentFn:
    """The function that the configuration names.

    Raises:
        UserError: none is named, or it cannot be imported.
    """
    config.check()
    return function_of(config.function, f"rollout.agent.function={config.function}")


@dataclass
class _Session:
    """One run of the agent: its conversations so far, and those that no other continues."""

    engine: InferenceEngine
    conversations: dict[str, Conversation] = field(default_factory=dict)  # by their messages as JSON
    ends: list[Conversation] = field(default_factory=list)
    error: GenerationError | None = None  # of the servers, at the last request
    asking: set[asyncio.Task[Any]] = field(default_factory=set)  # requests under way

    def record(self, messages: list[dict[str, Any]], conversation: Conversation, parent: Conversation | None) -> None:
        """Adds a conversation, whose last answer is sampled, as a continuation of `parent`."""
        if parent is not None:
            self.ends.remove(parent)
        self.conversations[_key_of(messages)] = conversation
        self.ends.append(conversation)

    def finished(self) -> list[Transcript]:
        """Segments of the conversations that no other continues."""
        return [segment for conversation in self.ends for segment in conversation.segments]


class AgentWorkflow(RolloutWorkflow):
    """Runs `agent_fn(base_url, api_key, data)` `gconfig.n_samples` times; its return value is the reward.

    `agent_fn` is sync (it then runs in a thread) or async. A run that raises, or takes too long, is masked and counted.
    Requests may set `max_tokens` and `stop` within the bounds of `gconfig`. A `temperature` or `top_p` other than the
    trainer's is refused: its log-probs would not be the policy's.
    """

    def __init__(
        self,
        agent_fn: AgentFn,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        config: AgentConfig | None = None,
    ):
        self.agent_fn = agent_fn
        self.gconfig = gconfig
        self.tokenizer = tokenizer
        self.config = config or AgentConfig()
        self._template = ChatTemplate(tokenizer)
        self._sessions: dict[str, _Session] = {}  # by key
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()
        self._threads = asyncio.Semaphore(self.config.max_threads)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Tensor]:
        url = await self._serve()
        runs = await together(self._run(engine, data, url) for _ in range(self.gconfig.n_samples))
        return pad_samples([segments for segments, _ in runs], [reward for _, reward in runs])

    async def aclose(self) -> None:
        """Stops the endpoint; a later episode starts another."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    # -- one run of the agent -----------------------------------------------------------------------------------

    async def _run(
        self, engine: InferenceEngine, data: dict[str, Any], url: str
    ) -> tuple[list[Transcript], float | RewardError]:
        """The segments of one run, at least one, and its reward."""
        key = secrets.token_urlsafe(24)
        session = self._sessions[key] = _Session(engine)
        reward: float | RewardError
        try:
            reward = _reward(await self._call(url, key, dict(data)))
        except RewardError as error:
            reward = error
        except Exception as error:  # the agent is the user's: its sample is masked and counted
            reward = RewardError(f"{type(error).__name__}: {error}")
        finally:
            del self._sessions[key]
            for request in session.asking:  # of a thread, which cannot be cancelled itself
                request.cancel()
        if session.error is not None:  # the servers failed, not the agent: the prompt is run again elsewhere
            raise session.error
        segments = session.finished()
        if not segments:
            if not isinstance(reward, RewardError):
                reward = RewardError("it asked for no completion")
            empty = Transcript()
            empty.give([self.tokenizer.eos_token_id or 0])  # a masked sequence, so that the failure is counted
            segments = [empty]
        if isinstance(reward, RewardError):
            name = getattr(self.agent_fn, "__name__", type(self.agent_fn).__name__)
            logger.warning("a sample is left out, as the agent %s failed: %s", name, reward)
        return segments, reward

    async def _call(self, url: str, key: str, data: dict[str, Any]) -> Any:
        """Runs the agent. The wait for a thread does not count to its time limit."""
        if is_async(self.agent_fn):
            return await self._in_time(self.agent_fn(url, key, data))
        async with self._threads:
            return await self._in_time(_in_thread(self.agent_fn, url, key, data))

    async def _in_time(self, run: Awaitable[Any]) -> Any:
        """Awaits `run`. Cancels it and raises RewardError after `time_limit_s`."""
        try:
            async with asyncio.timeout(self.config.time_limit_s) as limit:
                return await run
        except TimeoutError:
            if not limit.expired():  # the agent's own
                raise
            knob_value = f"rollout.agent.time_limit_s={self.config.time_limit_s:g}"
            raise RewardError(f"it took longer than {knob_value}") from None

    # -- the endpoint -------------------------------------------------------------------------------------------

    async def _serve(self) -> str:
        """Starts the endpoint unless it runs; returns its URL."""
        async with self._starting:
            if self._runner is None:
                app = web.Application(client_max_size=MAX_BODY)
                app.router.add_post("/v1/chat/completions", self._complete)
                # A request whose client has gone is dropped, at the server too.
                runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=CLOSE_S, access_log=None)
                await runner.setup()
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                self._runner = runner
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def _complete(self, request: web.Request) -> web.Response:
        session = self._sessions.get(request.headers.get("Authorization", "").removeprefix("Bearer "))
        if session is None:
            return _refusal(401, "this key belongs to no episode that is running")
        own = asyncio.current_task()
        assert own is not None, "a handler runs in a task"
        session.asking.add(own)
        try:
            return await self._answer(session, request)
        finally:
            session.asking.discard(own)

    async def _answer(self, session: _Session, request: web.Request) -> web.Response:
        try:
            body = await request.json()
            messages = [dict(message) for message in body["messages"]]
        except (json.JSONDecodeError, KeyError, TypeError, ValueError):
            return _refusal(400, "the body is no chat completion request with messages")
        if problem := self._problem(body):
            return _refusal(400, problem)
        parent, turns = self._resume(session, messages)
        conversation = Conversation(self._template) if parent is None else parent.copy()
        limit = session.engine.max_sequence_tokens
        model_request = conversation.ask(turns, self._sampling(body), limit)
        if model_request is None:
            tokens = len(self._template.ids([*conversation.messages, *turns]))
            return _refusal(400, f"the conversation has {tokens} tokens of at most {limit}, no room for an answer")
        try:
            response = await session.engine.agenerate(model_request)
        except RequestRefused as error:
            return _refusal(400, str(error))
        except GenerationError as error:
            session.error = error
            return _refusal(503, str(error))
        session.error = None
        if parent is not None and parent not in session.ends:  # its first continuation trains on its answers
            conversation.as_read()
            parent = None
        conversation.sample(response)
        text = self.tokenizer.decode(response.output_tokens, skip_special_tokens=True)
        answer = {"role": "assistant", "content": text}
        session.record([*messages, answer], conversation, parent)
        prompt_tokens = len(model_request.input_ids)
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": response.output_len}
        return web.json_response(
            {
                "id": f"chatcmpl-{secrets.token_hex(12)}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": str(body.get("model", "policy")),
                "choices": [{"index": 0, "message": answer, "finish_reason": response.stop_reason}],
                "usage": {**usage, "total_tokens": prompt_tokens + response.output_len},
            }
        )

    def _problem(self, body: dict[str, Any]) -> str | None:
        """The reason why a request cannot be served; None if it can."""
        if body.get("stream"):
            return "stream=true is not served; ask for whole completions"
        if body.get("n", 1) != 1:
            return "n must be 1: every completion is an episode of its own"
        if body.get("tools"):
            return "tools are not served; describe them in the messages and read calls from the answer"
        for name in ("temperature", "top_p"):
            if body.get(name, getattr(self.gconfig, name)) != getattr(self.gconfig, name):
                value = getattr(self.gconfig, name)
                return f"{name} must be gconfig.{name}={value}, as the trainer's log-probs are"
        limit = _token_limit(body)
        if limit is not None and not (isinstance(limit, int) and limit >= 1):
            return f"max_tokens={limit!r} must be a number of at least 1"
        return None

    def _sampling(self, body: dict[str, Any]) -> GenerationHyperparameters:
        """`gconfig`, with the request's own limit of tokens and stop strings."""
        limit, stop = _token_limit(body) or self.gconfig.max_new_tokens, body.get("stop") or []
        return self.gconfig.new(
            n_samples=1,
            max_new_tokens=min(limit, self.gconfig.max_new_tokens),
            stop=[*self.gconfig.stop, *([stop] if isinstance(stop, str) else stop)],
        )

    def _resume(
        self, session: _Session, messages: list[dict[str, Any]]
    ) -> tuple[Conversation | None, list[dict[str, Any]]]:
        """Finds the longest recorded beginning, of at least a prompt and an answer, and the turns after it."""
        for count in range(len(messages) - 1, 1, -1):
            key = _key_of(messages[:count])
            if key in session.conversations:
                return session.conversations[key], messages[count:]
        return None, messages


async def _in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls `function` in a daemon thread: one that hangs does not keep the process from ending."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    outcome: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: Exception | None) -> None:
        if outcome.done():  # nobody waits any more
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(value)

    def work() -> None:
        value, failure = None, None
        try:
            value = context.run(function, *arguments)
        except Exception as error:
            failure = error
        except BaseException as error:  # such as SystemExit: ends the run of the agent, not the trainer
            failure = RuntimeError(repr(error))
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=work, name="agent", daemon=True).start()
    return await outcome


def _reward(value: Any) -> Reward:
    """The agent's return value as a reward of one part."""
    return value if isinstance(value, Reward) else Reward(float(value), [float(value)])


def _token_limit(body: dict[str, Any]) -> Any:
    return body.get("max_completion_tokens") or body.get("max_tokens")


def _key_of(messages: list[dict[str, Any]]) -> str:
    """Identifies a conversation by its roles and contents."""
    return json.dumps([[message.get("role"), message.get("content")] for message in messages])


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=status)
