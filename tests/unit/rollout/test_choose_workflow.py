"""`rollout.workflow`: every choice runs as configured, and every wrong one is one line before a server starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conversations import DATA, GCONFIG, reward_of_seven, sequences

from megarl import cli
from megarl.config import Config
from megarl.knobs import UserError
from megarl.rollout.api import RolloutWorkflow
from megarl.rollout.workflows.choose import DEFAULT, build_workflow, check_imports
from megarl.rollout.workflows.remax import ReMaxRLVRWorkflow
from megarl.rollout.workflows.rlvr import RLVRWorkflow

OWN = """
import json
import urllib.request

from megarl.rollout.workflows.rlvr import RLVRWorkflow
from megarl.rollout.workflows.tools import Tool


class Own(RLVRWorkflow):
    pass


class NoWorkflow:
    pass


class Greedy(RLVRWorkflow):
    def __init__(self, reward_fn):
        pass


def make_completions(model, processing_class, prompts, generation_config):
    return ["7" for _ in prompts]


def shout():
    return Tool("shout", "Shouts.", {"text": "what"}, lambda text: text.upper())


def no_tool():
    return "hammer"


def solve(base_url, api_key, data):
    body = json.dumps({"messages": data["messages"]}).encode()
    request = urllib.request.Request(base_url + "/chat/completions", body, {"Authorization": f"Bearer {api_key}"})
    with urllib.request.urlopen(request, timeout=300) as reply:
        return float(json.load(reply)["choices"][0]["message"]["content"] == data["answer"])


NUMBER = 3
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working folder with a module of the user's own, `own_rollouts`."""
    (tmp_path / "own_rollouts.py").write_text(OWN)
    (tmp_path / "facts.txt").write_text("Leo has 7 pens\n\nMia has 3 cups\n")
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("own_rollouts", None)
    sys.path[:] = [path for path in sys.path if path != str(tmp_path)]


def configured(*overrides: str) -> Config:
    return cli.load(["+experiment=gsm8k_grpo", *overrides])


def built(config: Config, tokenizer: Any, algorithm_workflow: str = DEFAULT) -> RolloutWorkflow:
    return build_workflow(config.rollout, algorithm_workflow, reward_of_seven, GCONFIG, tokenizer)


CALL = f"<tool_call>{json.dumps({'name': 'shout', 'arguments': {'text': 'seven'}})}</tool_call>"
FIND = f"<tool_call>{json.dumps({'name': 'search', 'arguments': {'query': 'pens'}})}</tool_call>"
CHOICES = {
    "rlvr": ([], lambda _: "7", ["7"], 1.0),
    "multi_turn": (
        ["rollout.multi_turn.feedback=Wrong", "rollout.multi_turn.turn_discount=0.25"],
        lambda prompt: "7" if "Wrong" in prompt else "3",
        ["3", "Wrong", "7"],
        0.25,
    ),
    "multi_turn, one turn": (["rollout.multi_turn.max_turns=1"], lambda _: "3", ["3"], 0.0),
    "multi_turn, half right": (["rollout.multi_turn.good_enough=0"], lambda _: "3", ["3"], 0.0),
    "tool_use, a tool of one's own": (
        ["rollout.tool_use.tools=[calculator,own_rollouts.shout]"],
        lambda prompt: "7" if "SEVEN" in prompt else CALL,
        [CALL, "SEVEN", "7"],
        1.0,
    ),
    "tool_use, search": (
        ["rollout.tool_use.tools=[search]", "rollout.tool_use.corpus=facts.txt", "rollout.tool_use.search_results=1"],
        lambda prompt: "7" if "7 pens<" in prompt.removeprefix("<|user|>Leo has 7 pens.") else FIND,
        [FIND, "Leo has 7 pens", "7"],
        1.0,
    ),
    "agent": (["rollout.agent.function=own_rollouts.solve"], lambda _: "7", ["7"], 1.0),
    "own_rollouts.Own": ([], lambda _: "7", ["7"], 1.0),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_workflow_chosen_by_the_knob_samples_as_configured(say: Any, tokenizer: Any, choice: str) -> None:
    knobs, script, turns, reward = CHOICES[choice]
    config = configured(f"rollout.workflow={choice.split(',')[0]}", *knobs)
    check_imports(config.rollout)
    engine = say(lambda prompt, _: script(prompt))
    batch = engine.rollout_batch([DATA], built(config, tokenizer))
    assert batch["rewards"].tolist() == [reward]
    ((whole, _),) = sequences(batch, tokenizer)
    rest = whole.removeprefix("<|user|>Leo has 7 pens.")
    for turn in turns:
        _, found, rest = rest.partition(turn)
        assert found, (turn, whole)
    engine.destroy()


def test_a_rollout_function_is_called(say: Any, tokenizer: Any) -> None:
    config = configured("rollout.rollout_func=own_rollouts.make_completions")
    check_imports(config.rollout)
    assert say(lambda *_: "3").rollout_batch([DATA], built(config, tokenizer))["rewards"].tolist() == [1.0]


def test_an_algorithms_own_workflow_wins_over_the_default_in_training_and_not_in_evaluation(tokenizer: Any) -> None:
    config = configured("algorithm=remax")
    assert type(built(config, tokenizer, "remax")) is ReMaxRLVRWorkflow
    assert type(built(config, tokenizer)) is RLVRWorkflow
    assert type(built(config, tokenizer, "own_rollouts.Own")).__name__ == "Own"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["rollout.workflow=multitrun"],
            "rollout.workflow=multitrun does not exist; did you mean multi_turn? there are",
        ),
        (
            ["rollout.workflow=x"],
            "rollout.workflow=x does not exist; there are: rlvr, multi_turn, tool_use, agent",
        ),
        (["rollout.workflow=remax"], "rollout.workflow=remax does not exist"),
        (["rollout.workflow=agent"], "rollout.workflow=agent needs rollout.agent.function=MODULE.FUNCTION"),
        (
            ["rollout.workflow=multi_turn", "rollout.rollout_func=a.b"],
            "rollout.rollout_func=a.b and rollout.workflow=multi_turn both make the completions; leave one out",
        ),
        (
            ["rollout.workflow=multi_turn", f"rollout.rollout_func=a.{'b' * 3000}"],
            "bbb... and rollout.workflow=multi_turn both make the completions; leave one out",
        ),
        (
            ["rollout.workflow=multi_turn", "algorithm=remax"],
            "rollout.workflow=multi_turn: ReMax samples in a way of its own (remax); choose another algorithm",
        ),
        (
            ["rollout.rollout_func=a.b", "algorithm=remax"],
            "rollout.rollout_func=a.b: ReMax samples in a way of its own; choose another algorithm, or no function",
        ),
        (["rollout.multi_turn.max_turns=0"], "rollout.multi_turn.max_turns=0 must be at least 1"),
        (["rollout.multi_turn.turn_discount=1.1"], "turn_discount=1.1 must be at least 0 and at most 1"),
        (["rollout.multi_turn.turn_discount=-0.1"], "turn_discount=-0.1 must be at least 0 and at most 1"),
        (["rollout.multi_turn.feedback=' '"], "rollout.multi_turn.feedback is empty"),
        (["rollout.tool_use.tools=[calculater]"], "calculater does not exist; did you mean calculator? there are"),
        (["rollout.tool_use.tools=[]"], "rollout.tool_use.tools is empty; name one at least"),
        (["rollout.tool_use.max_turns=0"], "rollout.tool_use.max_turns=0 must be at least 1"),
        (["rollout.tool_use.max_result_chars=0"], "rollout.tool_use.max_result_chars=0 must be at least 1"),
        (["rollout.tool_use.search_results=0"], "rollout.tool_use.search_results=0 must be at least 1"),
        (["rollout.tool_use.python_time_limit_s=0"], "python_time_limit_s=0.0 must be above 0"),
        (["rollout.tool_use.python_memory_limit_mb=9"], "python_memory_limit_mb=9 must be at least 64"),
        (["rollout.workflow=tool_use", "rollout.tool_use.tools=[search]"], "search needs rollout.tool_use.corpus=FILE"),
        (
            ["rollout.workflow=tool_use", "rollout.tool_use.tools=[search]", "rollout.tool_use.corpus=none.txt"],
            "rollout.tool_use.corpus=none.txt cannot be read (FileNotFoundError); give a text file",
        ),
        (["rollout.agent.time_limit_s=0"], "rollout.agent.time_limit_s=0.0 must be above 0"),
        (["rollout.agent.max_threads=0"], "rollout.agent.max_threads=0 must be at least 1"),
    ],
)
def test_a_wrong_value_is_refused_with_the_configuration(overrides: list[str], says: str) -> None:
    with pytest.raises(UserError) as caught:
        configured(*overrides)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["rollout.workflow=own_rollouts.Gone"], "rollout.workflow=own_rollouts.Gone cannot be imported from"),
        (["rollout.workflow=no_such_module.Own"], "rollout.workflow=no_such_module.Own cannot be imported from"),
        (
            ["rollout.workflow=own_rollouts.NoWorkflow"],
            "rollout.workflow=own_rollouts.NoWorkflow is not a class derived from megarl.rollout.api.RolloutWorkflow",
        ),
        (["rollout.workflow=own_rollouts.solve"], "own_rollouts.solve is not a class derived from"),
        (["rollout.rollout_func=own_rollouts.gone"], "rollout.rollout_func=own_rollouts.gone cannot be imported from"),
        (
            ["rollout.workflow=agent", "rollout.agent.function=own_rollouts.gone"],
            "rollout.agent.function=own_rollouts.gone cannot be imported from",
        ),
        (
            ["rollout.workflow=agent", "rollout.agent.function=solve"],
            "rollout.agent.function=solve must be MODULE.FUNCTION of your own",
        ),
        (
            ["rollout.workflow=agent", "rollout.agent.function=own_rollouts.NUMBER"],
            "rollout.agent.function=own_rollouts.NUMBER is a int, not a function",
        ),
        (
            ["rollout.workflow=tool_use", "rollout.tool_use.tools=[own_rollouts.no_tool]"],
            "own_rollouts.no_tool() returned a str; return a megarl.rollout.workflows.tools.Tool",
        ),
    ],
)
def test_what_cannot_be_imported_is_refused_by_preflight_and_before_a_server_starts(
    overrides: list[str], says: str, tokenizer: Any
) -> None:
    config = configured(*overrides)
    for refuse in (lambda: check_imports(config.rollout), lambda: built(config, tokenizer)):
        with pytest.raises(UserError) as caught:
            refuse()
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_class_that_cannot_be_constructed_is_refused(tokenizer: Any) -> None:
    config = configured("rollout.workflow=own_rollouts.Greedy")
    with pytest.raises(
        UserError, match=r"rollout\.workflow=own_rollouts\.Greedy\(reward_fn, gconfig, tokenizer\) cannot"
    ):
        built(config, tokenizer)


def test_a_corpus_without_a_passage_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    knobs = ("rollout.tool_use.tools=[search]", "rollout.tool_use.corpus=empty.txt")
    with pytest.raises(UserError, match=r"rollout\.tool_use\.corpus=empty\.txt holds no passage"):
        configured("rollout.workflow=tool_use", *knobs)
