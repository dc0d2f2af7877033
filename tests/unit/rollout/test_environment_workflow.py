"""Episodes in an environment: token-exact transcripts, answers alone trained on, lost episodes masked and counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from conversations import GCONFIG, sequences

from megarl import cli
from megarl.environments.config import EnvironmentConfig
from megarl.environments.pool import EnvironmentPool
from megarl.knobs import UserError
from megarl.rollout.executor import WorkflowError
from megarl.rollout.workflows.choose import DEFAULT, build_workflow, check_imports
from megarl.rollout.workflows.environment import EnvironmentWorkflow
from megarl.types import Reward

COUNT = "tests.unit.environments.worlds.Count"
PROMPT = [{"role": "user", "content": "Count."}]


@pytest.fixture
def played(say: Any, tokenizer: Any) -> Iterator[Any]:
    """`played(row, answer, reward_fn=None, **knobs)`: the batch of one episode, and the pool."""
    with ExitStack() as opened:

        def run(
            row: dict[str, Any],
            answer: Any,
            reward_fn: Any = None,
            n_samples: int = 1,
            max_sequence_tokens: int | None = None,
            **knobs: Any,
        ) -> Any:
            pool = opened.enter_context(EnvironmentPool(EnvironmentConfig(**{"kind": COUNT, **knobs})))
            engine = say(lambda prompt, _: answer(prompt) if callable(answer) else answer)
            engine.max_sequence_tokens = max_sequence_tokens or engine.max_sequence_tokens
            workflow = EnvironmentWorkflow(pool, reward_fn, GCONFIG.new(n_samples=n_samples), tokenizer)
            return engine.rollout_batch([{"messages": PROMPT, **row}], workflow), pool

        yield run


def test_answers_are_trained_on_and_observations_only_read(played: Any, tokenizer: Any) -> None:
    row = {"from": 3, "answer": "stop"}
    batch, _ = played(row, lambda prompt: "stop" if "It is 5" in prompt else "go")
    ((whole, trained),) = sequences(batch, tokenizer)
    eos = tokenizer.eos_token
    user, assistant = "<|user|>", "<|assistant|>"
    assert whole == (
        f"{user}Count.\n\nIt is 3.{assistant}go{eos}{user}It is 4.{assistant}go{eos}{user}It is 5.{assistant}stop{eos}"
    )
    assert trained == f"go{eos}go{eos}stop{eos}"
    assert batch["rewards"].tolist() == [0.75]
    assert (batch["rollout_logprobs"][~batch["loss_mask"]] == 0).all()


def test_an_episode_ends_after_max_turns_with_what_the_environment_gives_then(played: Any, tokenizer: Any) -> None:
    batch, _ = played({"end": 10.0}, "go", max_turns=3)
    assert batch["rewards"].tolist() == [10.75]
    assert batch["reward_columns"].tolist() == [[10.75]]
    ((_, trained),) = sequences(batch, tokenizer)
    assert trained == f"go{tokenizer.eos_token}" * 3


def test_without_a_reward_of_the_environment_the_functions_score_the_last_answer(played: Any) -> None:
    seen = {}

    def reward_fn(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
        seen.update(data, completions=completions)
        return Reward(0.5, [0.5, 0.0])

    batch, _ = played({"fault": "none"}, "go", reward_fn, max_turns=2)
    assert batch["rewards"].tolist() == [0.5]
    assert batch["reward_columns"].tolist() == [[0.5]], "one column, as of episodes with the environment's rewards"
    assert seen["completions"] == "go"
    assert "It is 1." in seen["transcript"]


def test_a_lost_episode_is_masked_and_the_others_are_kept(played: Any) -> None:
    answers = iter(["go", "stop", "stop", "stop"])
    row = {"answer": "stop", "size": 300}  # only the answer "go" gets the long observation
    batch, pool = played(row, lambda _: next(answers), n_samples=4, max_observation_chars=200)
    assert batch["rewards"].tolist() == [0.25] * 3
    assert pool.report().startswith("1 of 4 episodes were lost in the environment: 1 lied, the first: ")


def test_a_prompt_whose_episodes_are_all_lost_names_the_first_cause(played: Any) -> None:
    with pytest.raises(WorkflowError, match=r"the environment tests\.\S+Count: .*the reward is nan"):
        played({"fault": "nan"}, "go", n_samples=2)


def test_a_reset_too_long_for_the_sequence_costs_its_episode(played: Any) -> None:
    with pytest.raises(WorkflowError, match=r"reset\(\) gave messages that cannot be read: a prompt has .* tokens"):
        played({"messages": [{"role": "user", "content": "Count. " * 40}]}, "go", max_sequence_tokens=12)


@pytest.mark.parametrize("call", ["reset", "step"])
def test_messages_that_the_template_refuses_cost_their_episode(
    call: str, played: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = {"reset": 3, "step": 4}[call]
    refuse = f"{{% if 'It is {number}' in messages[-1].content %}}{{{{ raise_exception('no number') }}}}{{% endif %}}"
    monkeypatch.setattr(tokenizer, "chat_template", refuse + tokenizer.chat_template)
    with pytest.raises(WorkflowError, match=rf"{call}\(\) gave messages that cannot be read: no number"):
        played({"from": 3}, "go")


def test_the_environment_is_chosen_by_its_knobs_and_started_once_before_a_run(tokenizer: Any) -> None:
    command = ["+experiment=gsm8k_grpo", "rollout.workflow=environment", f"rollout.environment.kind={COUNT}"]
    config = cli.load(command).rollout
    check_imports(config)
    with EnvironmentPool(config.environment) as pool:
        assert isinstance(build_workflow(config, DEFAULT, None, GCONFIG, tokenizer, pool), EnvironmentWorkflow)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="Broken cannot start: OSError: no room"):
        check_imports(cli.load([*command, f"rollout.environment.kind={COUNT.replace('Count', 'Broken')}"]).rollout)
    with pytest.raises(UserError, match=r"needs rollout\.environment\.kind"):
        cli.load(command[:2])
