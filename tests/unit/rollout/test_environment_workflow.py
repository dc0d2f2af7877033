"""Episodes in an environment: token-exact transcripts, answers alone trained on, lost episodes masked and counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from conversations import GCONFIG, assert_trained_once, sequences
from test_conversation import CALL, TRIES, Talk, in_turn, tokenizer_of

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


@pytest.mark.parametrize(("template", "answers", "segments"), TRIES)
def test_an_episode_is_trained_in_as_many_sequences_as_the_template_makes_of_it(
    start_server: Any, connect: Any, template: str, answers: tuple[str, ...], segments: int
) -> None:
    tokenizer = tokenizer_of(template)
    talk = Talk(start_server, connect, tokenizer, in_turn(*answers))
    last = tokenizer.decode(tokenizer.encode(answers[-1], add_special_tokens=False), skip_special_tokens=True)
    with EnvironmentPool(EnvironmentConfig(kind=COUNT)) as pool:
        workflow = EnvironmentWorkflow(pool, None, GCONFIG, tokenizer)  # type: ignore[arg-type]
        batch = talk.engine.rollout_batch([{"messages": PROMPT, "answer": last}], workflow)
    assert_trained_once(batch, talk.exchanges)
    assert (batch.num_seqs, batch.num_samples) == (segments, 1)
    assert batch["rewards"].tolist() == [0.75] * segments
    messages = [{"role": "user", "content": "Count.\n\nIt is 0."}]
    for number, (prompt, text) in enumerate(zip(talk.prompts, answers, strict=True), 1):
        assert prompt == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        said = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)[:-1])
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"It is {number}."}]


def test_a_result_of_a_tool_is_read_as_the_template_writes_it(start_server: Any, connect: Any) -> None:
    tokenizer = tokenizer_of("qwen3")
    talk = Talk(
        start_server, connect, tokenizer, in_turn(f"<think>\nI ask.\n</think>\n\n{CALL}<|im_end|>", "7<|im_end|>")
    )
    row = {"messages": PROMPT, "answer": "7", "role": "tool"}
    with EnvironmentPool(EnvironmentConfig(kind=COUNT)) as pool:
        batch = talk.engine.rollout_batch([row], EnvironmentWorkflow(pool, None, GCONFIG, tokenizer))  # type: ignore[arg-type]
    assert_trained_once(batch, talk.exchanges)
    assert batch.num_seqs == 1, "Qwen3's template keeps the thoughts in a loop of tools"
    assert "<tool_response>\nIt is 1.\n</tool_response>" in talk.prompts[1]


def test_tools_are_described_and_their_results_come_back_in_a_role_that_the_template_knows(
    played: Any, tokenizer: Any, start_server: Any, connect: Any
) -> None:
    batch, _ = played({"role": "tool", "answer": "stop"}, lambda prompt: "stop" if "It is 1" in prompt else "go")
    ((whole, _),) = sequences(batch, tokenizer)
    assert "<|user|>It is 1.<|assistant|>" in whole
    described = tokenizer_of("qwen3")
    talk = Talk(start_server, connect, described, in_turn("7<|im_end|>"))
    with EnvironmentPool(EnvironmentConfig(kind=COUNT.replace("Count", "Tooled"))) as pool:
        workflow = EnvironmentWorkflow(pool, None, GCONFIG, described)  # type: ignore[arg-type]
        talk.engine.rollout_batch([{"messages": PROMPT, "answer": "7"}], workflow)
    assert '"name": "ring"' in talk.prompts[0]


def test_an_episode_lost_in_its_reset_is_one_masked_sample(played: Any, tmp_path: Path) -> None:
    batch, pool = played({"answer": "stop", "lost": str(tmp_path / "lost")}, "stop", n_samples=3, max_processes=1)
    assert batch["rewards"].tolist() == [0.25] * 2
    lost = "1 failed, the first: reset() failed, ValueError: the first is lost"
    assert pool.report() == f"1 of 3 episodes were lost in the environment: {lost}"


def test_rewards_whose_sum_float32_does_not_hold_cost_their_episode(played: Any) -> None:
    answers = iter(["go", "stop", "stop"])
    with pytest.raises(WorkflowError, match=r"the episode's rewards add to 6e\+38, which float32 does not hold"):
        played({"fault": "huge", "answer": "stop"}, lambda _: next(answers))
    batch, _ = played({"fault": "huge", "answer": "stop"}, "stop")
    assert batch["rewards"].isfinite().all()


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


@pytest.mark.parametrize(
    ("fault", "cause"), [("nan", "the reward is nan"), ("raise in reset", "ValueError: two lines")]
)
def test_a_prompt_whose_episodes_are_all_lost_names_the_first_cause(played: Any, fault: str, cause: str) -> None:
    with pytest.raises(WorkflowError, match=rf"the environment tests\.\S+Count: .*{cause}"):
        played({"fault": fault}, "go", n_samples=2)


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
