"""A knob that a mode would not read is refused, with what to set instead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl import cli, evaluate
from megarl.knobs import UserError

GRPO = "+experiment=gsm8k_grpo"
OPD = [GRPO, "algorithm=opd", "teacher.source=policy"]
SFT = [
    "+experiment=gsm8k_sft",
    "algorithm=opd",
    "algorithm.divergence=top_k",
    "teacher.source=server",
    "teacher.addresses=[h:1]",
]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [GRPO, "algorithm=remax", "curriculum.skip=both"],
            "curriculum.skip=both goes by rewards, and ReMax's samples",
        ),
        ([GRPO, "algorithm=gdpo", "rewards.weights=[1]"], r"rewards.weights=\[1.0\]: GDPO weights each reward's adv"),
        ([*OPD, "algorithm.kl_coef=0.1", "algorithm.kl_in=reward"], "algorithm.kl_in=reward: with algorithm.reward_co"),
        ([*SFT, "algorithm.kl_coef=0.1"], "algorithm.kl_coef=0.1: method=sft learns from the teacher and the data"),
        ([*SFT, "algorithm.reward_coef=0.1"], "algorithm.reward_coef=0.1: method=sft learns from the teacher"),
        ([*SFT, "algorithm.entropy_coef=0.1"], "algorithm.entropy_coef=0.1: method=sft learns from the teacher"),
        ([*SFT, "algorithm.aggregate=sequence"], "algorithm.aggregate=sequence: method=sft .*; leave it at token"),
    ],
)
def test_a_knob_that_would_not_be_read_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        cli.load(overrides)


@pytest.mark.parametrize(
    "knob", ["actor.lora.path={}", "resume={}", "actor.lora.quantization=nf4"], ids=["adapters", "run", "quantised"]
)
def test_an_evaluation_of_other_weights_than_the_checkpoints_is_refused(
    knob: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It measured the checkpoint alone, and reported that accuracy as the trained model's."""
    config = cli.load([GRPO, "actor.lora.rank=4"])
    name, _, value = knob.format(tmp_path).partition("=")
    if name == "resume":
        config = replace(config, resume=value)
    else:
        lora = replace(config.actor.lora, **{name.rpartition(".")[2]: value})
        config = replace(config, actor=replace(config.actor, lora=lora))
    monkeypatch.setattr(evaluate, "read_inputs", lambda *_: pytest.fail("nothing is read"))
    with pytest.raises(UserError, match=rf"{name}=.*: an evaluation measures the checkpoint at actor.path alone"):
        evaluate.main(config)


def test_an_evaluations_servers_are_deterministic_as_the_run_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Started(Exception): ...

    def start(*_: Any, **given: Any) -> None:
        raise Started(given["deterministic"])

    monkeypatch.setattr(evaluate, "SGLangServers", start)
    monkeypatch.setattr(evaluate, "build_evaluator", lambda *_: None)
    config = cli.load([GRPO, "deterministic=true", f"run_root={tmp_path}"])
    with pytest.raises(Started) as started:
        evaluate.main(config)
    assert started.value.args == (config.determinism,)
    assert config.determinism.is_on


@pytest.mark.parametrize(("port", "fits"), [(65534, True), (65535, False)])
def test_ports_of_all_servers_exist(port: int, fits: bool) -> None:
    """A port is a number of 16 bits; the servers take the following ones, too."""
    overrides = [GRPO, "server.n_servers=2", f"server.port={port}"]
    if fits:
        assert cli.load(overrides).server.port == port
    else:
        with pytest.raises(UserError, match=r"server\.port=65535 with server\.n_servers=2 needs ports above 65535"):
            cli.load(overrides)
