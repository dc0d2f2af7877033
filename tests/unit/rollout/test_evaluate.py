import copy
import json
import math

import pytest
import torch
from aiohttp import web
from fault_server import answer

from megarl.knobs import UserError
from megarl.observe.metrics import stats_tracker
from megarl.rollout.api import RolloutWorkflow
from megarl.rollout.evaluate import Evaluator, EvaluatorConfig
from megarl.rollout.workflows.multi_turn import MultiTurnConfig, MultiTurnWorkflow
from megarl.rollout.workflows.rlvr import RLVRWorkflow
from megarl.types import GenerationHyperparameters, PackedBatch, cu_seqlens_of

PROBLEMS = [{"messages": [{"role": "user", "content": f"say {i}"}], "i": i} for i in range(4)]


@pytest.fixture
def engine(start_server, connect, tokenizer):
    """The completions of a group say 0, 1, ... and carry versions 2 and 3."""

    async def reply(body, request):
        answers = [answer([*tokenizer.encode(str(i)), 0], reason="stop") for i in range(len(body["input_ids"]))]
        for each in answers:
            each["meta_info"]["weight_versions"] = [
                {"version": "2", "start": 0, "end": 1},
                {"version": "3", "start": 1, "end": 2},
            ]
        return web.json_response(answers)

    return connect(start_server(reply))


def solved_up_to(prompt, completions, prompt_ids, completion_ids, i, **data):
    return float(int(completions) < i)


def evaluator(config, tokenizer, folder):
    gconfig = config.sampling(GenerationHyperparameters(n_samples=8, max_new_tokens=4))
    return Evaluator(config, RLVRWorkflow(solved_up_to, gconfig, tokenizer), PROBLEMS, tokenizer, folder)


def test_accuracy_is_over_all_samples_and_its_error_over_problems(engine, tokenizer, tmp_path):
    stats_tracker.export()
    evaluation = evaluator(EvaluatorConfig(n_samples=3), tokenizer, tmp_path).evaluate(engine, 20)
    assert (evaluation.num_problems, evaluation.num_samples, evaluation.num_rejected) == (4, 12, 0)
    assert evaluation.accuracy == pytest.approx((0 + 1 + 2 + 3) / 12)
    assert evaluation.stderr == pytest.approx(torch.tensor([0, 1 / 3, 2 / 3, 1.0]).std().item() / 2)
    stats = stats_tracker.export()
    assert stats["eval/accuracy"] == evaluation.accuracy
    assert not [name for name in stats if name.startswith("rollout/")]


def test_every_sample_is_kept(engine, tokenizer, tmp_path):
    evaluation = evaluator(EvaluatorConfig(n_samples=2), tokenizer, tmp_path / "eval").evaluate(engine, 20)
    assert evaluation.path == tmp_path / "eval" / "step-000020.jsonl"
    lines = [json.loads(line) for line in evaluation.path.read_text().splitlines()]
    assert len(lines) == 8
    assert lines[3] == {
        "step": 20,
        "problem": 1,
        "prompt": "<|user|>say 1<|assistant|>",
        "completion": "1<|endoftext|>",
        "reward": 0.0,
        "solved": False,
        "versions": [2, 3],
    }
    assert sum(line["solved"] for line in lines) / 8 == evaluation.accuracy


def test_a_sample_in_several_segments_counts_once_and_is_one_line(engine, tokenizer, tmp_path):
    def told(prompt, completions, prompt_ids, completion_ids, **data):
        return float("again" in prompt)

    tokenizer = copy.deepcopy(tokenizer)
    shown = "<|{{ m.role }}|>{{ 'x' if m.role == 'assistant' else m.content }}"
    tokenizer.chat_template = "{% for m in messages %}" + shown + "{% endfor %}<|assistant|>"
    config = EvaluatorConfig(n_samples=2)
    gconfig = config.sampling(GenerationHyperparameters(max_new_tokens=4))
    workflow = MultiTurnWorkflow(told, gconfig, tokenizer, MultiTurnConfig(turn_discount=1.0, feedback="again"))
    evaluation = Evaluator(config, workflow, PROBLEMS, tokenizer, tmp_path).evaluate(engine, 20)
    assert (evaluation.num_samples, evaluation.accuracy, evaluation.maj_at_k) == (2 * len(PROBLEMS), 1.0, 1.0)
    lines = [json.loads(line) for line in evaluation.path.read_text().splitlines()]
    assert len(lines) == evaluation.num_samples
    assert lines[2]["prompt"] == "<|user|>say 1<|assistant|>x<|user|>again<|assistant|>"
    assert lines[2]["completion"] == "0<|endoftext|>0<|endoftext|>"
    assert (lines[2]["problem"], lines[2]["segments"], lines[2]["versions"]) == (1, 2, [2, 3, 2, 3])


@pytest.mark.parametrize(("mask", "turns"), [("011", 0), ("0110", 3), ("0101", 4)])
def test_a_conversation_of_several_turns_is_kept_by_turns(mask, turns, tokenizer, tmp_path):
    ids = torch.tensor(tokenizer.encode("1234")[: len(mask)])
    batch = PackedBatch(
        cu_seqlens_of(torch.tensor([len(mask)])),
        {"input_ids": ids, "loss_mask": torch.tensor([sampled == "1" for sampled in mask])},
        {"rewards": torch.tensor([1.0]), "group_ids": torch.tensor([7])},
    )
    path = evaluator(EvaluatorConfig(), tokenizer, tmp_path)._write(batch, [True], 3)
    (line,) = [json.loads(line) for line in path.read_text().splitlines()]
    read = [sampled for sampled, _ in line.get("turns", [])]
    assert read == [False, True, False, True][:turns]
    assert "".join(text for _, text in line.get("turns", [])) == "1234"[: len(mask) if turns else 0]


def test_rejected_problems_are_counted_apart(engine, tokenizer, tmp_path):
    class RejectsOdd(RLVRWorkflow):
        async def arun_episode(self, engine, data):
            return None if data["i"] % 2 else await super().arun_episode(engine, data)

    config = EvaluatorConfig(n_samples=1)
    workflow = RejectsOdd(solved_up_to, config.sampling(GenerationHyperparameters()), tokenizer)
    evaluation = Evaluator(config, workflow, PROBLEMS, tokenizer, tmp_path).evaluate(engine, 0)
    assert (evaluation.num_problems, evaluation.num_rejected, evaluation.accuracy) == (2, 2, 0.5)


def test_one_problem_has_no_error_of_the_mean(engine, tokenizer, tmp_path):
    config = EvaluatorConfig()
    workflow = RLVRWorkflow(solved_up_to, config.sampling(GenerationHyperparameters()), tokenizer)
    assert math.isnan(Evaluator(config, workflow, PROBLEMS[:1], tokenizer, tmp_path).evaluate(engine, 0).stderr)


def test_a_workflow_with_rewards_per_token_cannot_be_evaluated(engine, tokenizer, tmp_path):
    class PerToken(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            ones = torch.ones(1, 3)
            return {"input_ids": ones, "attention_mask": ones, "loss_mask": ones, "rewards": ones}

    with pytest.raises(UserError, match="PerToken gives a reward per token"):
        Evaluator(EvaluatorConfig(), PerToken(), PROBLEMS, tokenizer, tmp_path).evaluate(engine, 0)


@pytest.mark.parametrize(
    ("config", "due"),
    [
        (EvaluatorConfig(every_steps=4), [0, 4, 8, 10]),
        (EvaluatorConfig(every_steps=5, at_start=False), [5, 10]),
        (EvaluatorConfig(every_steps=5, at_end=False), [0, 5]),
        (EvaluatorConfig(every_steps=0), [0, 10]),
    ],
)
def test_the_schedule(config, due, tokenizer, tmp_path):
    chosen = evaluator(config, tokenizer, tmp_path)
    assert [step for step in range(11) if chosen.is_due(step, 10)] == due


def test_temperature_0_is_greedy():
    gconfig = GenerationHyperparameters(n_samples=8, temperature=0.6, max_new_tokens=5)
    sampling = EvaluatorConfig(temperature=0.0, n_samples=2).sampling(gconfig)
    assert (sampling.greedy, sampling.temperature, sampling.n_samples, sampling.max_new_tokens) == (True, 1.0, 2, 5)
    assert EvaluatorConfig(temperature=0.3).sampling(gconfig.new(greedy=True)).greedy is False


def test_a_setting_out_of_range_is_refused_and_so_is_an_empty_split(tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"evaluator\.n_samples=0 must be at least 1"):
        EvaluatorConfig(n_samples=0)
    with pytest.raises(UserError, match="got no problems"):
        Evaluator(
            EvaluatorConfig(),
            RLVRWorkflow(solved_up_to, GenerationHyperparameters(), tokenizer),
            [],
            tokenizer,
            tmp_path,
        )


def test_pass_at_k_and_the_majority_are_over_problems(start_server, connect, tokenizer, tmp_path):
    """Of three samples, two say 1 and one says 0; an answer is right where it is below the problem's number."""

    async def reply(body, request):
        return web.json_response(
            [answer([*tokenizer.encode(text), 0], reason="stop") for text in ("0", "1", "1")[: len(body["input_ids"])]]
        )

    evaluation = evaluator(EvaluatorConfig(n_samples=3), tokenizer, tmp_path).evaluate(connect(start_server(reply)), 0)
    assert evaluation.accuracy == pytest.approx((0 + 1 + 3 + 3) / 12)
    assert evaluation.pass_at_k == pytest.approx(3 / 4)  # problem 1 is solved by its 0
    assert evaluation.maj_at_k == pytest.approx(2 / 4)  # which the 1s outvote


def test_each_evaluation_set_has_its_own_measures_with_intervals(engine, tokenizer, tmp_path):
    config = EvaluatorConfig(n_samples=3, pass_at=[1, 2], confidence=0.9)
    workflow = RLVRWorkflow(solved_up_to, config.sampling(GenerationHyperparameters(max_new_tokens=4)), tokenizer)
    sets = ["easy", "easy", "hard", "hard"]
    stats_tracker.export()
    evaluation = Evaluator(config, workflow, PROBLEMS, tokenizer, tmp_path, sets=sets).evaluate(engine, 0)
    everything, easy, hard = (evaluation.estimates[label] for label in ("", "easy", "hard"))
    assert [m["accuracy"].value for m in (everything, easy, hard)] == pytest.approx([1 / 2, 1 / 6, 5 / 6])
    assert [m["pass@2"].value for m in (easy, hard)] == pytest.approx([(0 + 2 / 3) / 2, 1])
    assert everything["accuracy"].method == "bootstrap"
    assert hard["pass@2"].method == "wilson"
    assert all(e.low <= e.value <= e.high for measures in (everything, easy, hard) for e in measures.values())
    stats = stats_tracker.export()
    assert stats["eval/accuracy"] == evaluation.accuracy
    assert stats["eval/easy/pass_at_2"] == easy["pass@2"].value
    assert stats["eval/hard/accuracy_low"] == hard["accuracy"].low
    assert stats["eval/maj_at_3_high"] == everything["maj@3"].high


def test_a_problem_with_fewer_scored_samples_than_k_is_left_out_of_pass_at_k(engine, tokenizer, tmp_path):
    def fails_once(prompt, completions, prompt_ids, completion_ids, i, **data):
        if i == 3 and completions == "0":
            raise ValueError("no verdict")
        return float(i == 3)

    config = EvaluatorConfig(n_samples=2, pass_at=[1, 2])
    workflow = RLVRWorkflow(fails_once, config.sampling(GenerationHyperparameters(max_new_tokens=4)), tokenizer)
    measures = Evaluator(config, workflow, PROBLEMS, tokenizer, tmp_path).evaluate(engine, 0).estimates[""]
    assert measures["pass@1"].value == pytest.approx(1 / 4)
    assert measures["pass@2"].value == 0  # of the other three
