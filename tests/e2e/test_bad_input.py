"""A user's mistake is one line and exit code 2, before a run folder is made or a server is started."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megarl import cli, train
from megarl.rollout.servers import server_config
from tests.exit_codes import exit_code

GRPO = "+experiment=gsm8k_grpo"
TINY = Path(cli.ASSETS) / "tiny"


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command with the arguments and returns the one line that it ends with."""

    def run(*arguments: str) -> str:
        root = [] if any(a.startswith("run_root=") for a in arguments) else [f"run_root={tmp_path / 'runs'}"]
        capsys.readouterr()  # what making the test's own files printed
        code = exit_code(lambda given: train.main(cli.load(given)), [*arguments, *root], monkeypatch)
        captured = capsys.readouterr()
        assert code == 2, captured
        lines = [line for line in captured.err.splitlines() if line]
        assert len(lines) == 1, lines
        assert lines[0].startswith("megarl: ")
        assert not (tmp_path / "runs").exists(), "a run folder was made"
        return lines[0]

    return run


def write_rows(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


ROWS = [{"question": f"What is {i} plus 1?", "answer": f"{i}+1={i + 1}\n#### {i + 1}"} for i in range(40)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([GRPO, "actor.pth=x"], "unknown config key actor.pth; did you mean actor.path?"),
        ([GRPO, "+actor.optimizer.learning_rate=1"], "unknown config key actor.optimizer.learning_rate"),
        ([GRPO, "totl_train_steps=3"], "did you mean total_train_steps?"),
        (
            [GRPO, "valid_dataset.split=test[:32]"],
            "'valid_dataset.split=test[:32]' cannot be read as KNOB=VALUE",
        ),
        ([GRPO, "seed"], "'seed' cannot be read as KNOB=VALUE"),
        ([GRPO, "seed=" + "9" * 5000], f"'seed={'9' * 195}' cannot be read as KNOB=VALUE"),
        (
            [GRPO, "server.colocate=true", "rollout.max_head_offpolicyness=1"],
            "gives the GPUs to one of them; set it to 0",
        ),
        ([GRPO, "reshard.overlap_scoring=true"], "rollout.max_head_offpolicyness=0 has none; raise it"),
        (
            [GRPO, "reshard.overlap_scoring=true", "rollout.max_head_offpolicyness=1", "server.quantization=fp8"],
            "server.quantization=fp8 rounds them on all ranks together",
        ),
        (
            [GRPO, "reshard.overlap_scoring=true", "reshard.path=full"],
            "reshard.overlap_scoring=true needs reshard.path=exact",
        ),
        ([GRPO, "server.colocate=true", "launcher=ray"], "launcher=ray places servers by itself; use launcher=local"),
        ([GRPO, "server.colocate=true", "reshard.delta=true"], "the servers keep no weights; set it to false"),
        (
            [GRPO, "server.colocate=true", "server.device=cuda", "reshard.transport=nccl"],
            "reshard.transport=nccl refuses two processes on one GPU",
        ),
        (
            [GRPO, "actor.offload_while_sampling=al"],
            "actor.offload_while_sampling=al must be one of all, optimizer, none; did you mean all?",
        ),
        (["+experiment=gsm8k_grp"], "experiment=gsm8k_grp does not exist; did you mean gsm8k_grpo?"),
        ([GRPO, "model=huge"], "model=huge does not exist; there are: "),
        ([GRPO, "total_train_steps=many"], "could not be converted to Integer"),
        ([GRPO, "actor.path"], "cannot be read as KNOB=VALUE"),
        ([GRPO, "method=ppo"], "method=ppo must be one of rl, sft, preference"),
        ([GRPO, "total_train_steps=0"], "total_train_steps=0 must be at least 1"),
        ([GRPO, "actor.path=/nowhere/model"], "actor.path=/nowhere/model is not a folder"),
        ([GRPO, "actor.init=random"], "actor.init=random is for method=sft"),
        ([GRPO, "actor.dtype=float8"], "actor.dtype=float8 must be one of float32, bfloat16"),
        ([GRPO, "actor.temperature=0.5"], "actor.temperature=0.5 must equal gconfig.temperature=1.0"),
        ([GRPO, "gconfig.n_samples=1"], "needs at least 2"),
        ([GRPO, "train_dataset.batch_size=3", "gconfig.n_samples=5"], "3 x gconfig.n_samples=5 = 15 sequences"),
        ([GRPO, "parallel.dp_size=3"], "parallel.dp_size=3 does not divide"),
        ([GRPO, "parallel.tp_size=3"], "does not divide the model's num_attention_heads=4"),
        ([GRPO, "parallel.pp_size=3", "algorithm.n_minibatches=1"], "does not divide the model's 2 layers"),
        ([GRPO, "parallel.tp_size=0"], "parallel.tp_size=0 must be at least 1"),
        ([GRPO, "parallel=dp2", "parallel.timeout_s=60"], "timeout_s=60 must exceed rollout.batch_timeout_s=1800"),
        ([GRPO, "gconfig.max_new_tokens=0"], "gconfig.max_new_tokens=0 must be at least 1"),
        ([GRPO, "gconfig.greedy=true"], "nothing learned"),
        ([GRPO, "gconfig.top_p=0"], "gconfig.top_p=0.0 must be above 0"),
        ([GRPO, "actor.optimizer.lr=-1"], "actor.optimizer.lr=-1.0 must be above 0"),
        ([GRPO, "actor.optimizer.min_lr_ratio=2"], "min_lr_ratio=2.0 must be at least 0 and at most 1"),
        ([GRPO, "actor.optimizer.warmup_steps=500"], "warmup_steps=500 must be below total_train_steps="),
        ([GRPO, "parallel.timeout_s=-1"], "parallel.timeout_s=-1.0 must be above 0"),
        ([GRPO, "saver.keep=0"], "saver.keep=0 must be at least 1"),
        ([GRPO, "valid_dataset.max_length=null"], "valid_dataset.max_length is not set"),
        ([GRPO, "algorithm.eps_clip=2"], "algorithm.eps_clip=2.0 must be above 0 and below 1"),
        ([GRPO, "algorithm.n_minibatches=0"], "algorithm.n_minibatches=0"),
        ([GRPO, "actor.max_tokens_per_mb=80"], "= 88 tokens do not fit into actor.max_tokens_per_mb=80"),
        ([GRPO, "gconfig.max_new_tokens=500"], "exceeds the model's max_position_embeddings=512"),
        ([GRPO, "train_dataset.max_length=null"], "train_dataset.max_length is not set"),
        ([GRPO, "train_dataset.max_length=5"], "over max_length 5"),
        (
            [GRPO, "server.device=cuda", "+sglang.attention_backend=fa3"],
            "fa3 takes 16-bit tensors, and server.dtype=",
        ),
        ([GRPO, "cluster.gpus_per_node=8", "+sglang.moe_runner_backend=auto"], "use one of triton, deep_gemm"),
        ([GRPO, "reshard.transport=cuda_ipc"], "reshard.transport=cuda_ipc moves weights between GPUs"),
        (
            ["+experiment=grpo_70b", "reshard.transport=shm"],
            "transport=shm stays on one machine, and 64 trainer",
        ),
        ([GRPO, "train_dataset.path=/nowhere/data"], "/nowhere/data"),
        ([GRPO, "train_dataset.split=dev"], "dev"),
        ([GRPO, "train_dataset.batch_size=100000"], "exceeds the"),
        ([GRPO, "resume=/nowhere/run"], "resume=/nowhere/run is not a folder"),
        ([GRPO, "+sglang.attention_backnd=triton"], "did you mean attention_backend?"),
        ([GRPO, "+sglang.pp_size=2"], "live weight updates do not support pipeline"),
        ([GRPO, "server.n_servers=0"], "n_servers=0 must be at least 1"),
        ([GRPO, "reshard.pause_mode=stop"], "pause_mode=stop must be one of"),
        ([GRPO, "rollout.max_retries=-1"], "max_retries=-1 must be at least 0"),
        ([GRPO, "evaluator.n_samples=0"], "evaluator.n_samples=0 must be at least 1"),
        ([GRPO, "experiment_name=a/b"], "must be one folder name"),
    ],
)
def test_a_wrong_setting_is_refused(arguments: list[str], message: str, refused: Callable[..., str]) -> None:
    assert message in refused(*arguments)


def test_an_unsupported_model_is_refused_with_the_supported_ones(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    line = refused(GRPO, f"actor.path={tmp_path}")
    assert "'gpt2' model; supported are deepseek_v3, gemma3_text, glm4_moe, " in line
    assert "qwen3, qwen3_5, qwen3_5_moe, qwen3_5_moe_text, qwen3_5_text, qwen3_moe, qwen3_next" in line


def test_a_tokenizer_larger_than_the_model_is_refused(
    refused: Callable[..., str], checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((checkpoints("qwen3", tied=True, vocab_size=100) / "config.json").read_text())
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path)
    assert "has a vocabulary of 100" in refused(GRPO, f"actor.path={tmp_path}")


def test_a_model_without_a_tokenizer_is_refused(refused: Callable[..., str], checkpoints: Callable[..., Path]) -> None:
    assert "holds no tokenizer" in refused(GRPO, f"actor.path={checkpoints('qwen3', tied=True)}")


def test_data_without_the_columns_is_refused_by_their_names(refused: Callable[..., str], tmp_path: Path) -> None:
    path = write_rows(tmp_path / "train.jsonl", [{"prompt": "1", "label": "2"}] * 40)
    line = refused(GRPO, f"train_dataset.path={path}")
    assert all(name in line for name in ("question", "answer", "prompt", "label"))


def test_empty_data_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "is empty" in refused(GRPO, f"train_dataset.path={write_rows(tmp_path / 'train.jsonl', [])}")


def test_answers_without_a_number_are_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    rows = [*ROWS, {"question": "Why?", "answer": "Because."}]
    assert "lack '#### N'" in refused(GRPO, f"train_dataset.path={write_rows(tmp_path / 'train.jsonl', rows)}")


def test_a_port_in_use_is_refused(refused: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"port {port} on 127.0.0.1 is in use" in refused(GRPO, f"server.port={port}")


def test_a_missing_sglang_is_refused_with_its_install_command(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server_config.server_arg_options.cache_clear()
    find = server_config.importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == "sglang" else find(name, *a))
    assert "make setup" in refused(GRPO)


def test_a_run_folder_that_cannot_be_written_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "runs2").write_text("a file, where the folder should be")
    assert "cannot be written" in refused(GRPO, f"run_root={tmp_path / 'runs2'}")


def test_a_folder_that_is_no_run_cannot_be_resumed(refused: Callable[..., str], tmp_path: Path) -> None:
    line = refused(GRPO, f"resume={tmp_path}")
    assert "is not a run" in line
    assert "config.yaml" in line


def test_a_world_that_the_layout_does_not_make_is_refused(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert "the world has 3 ranks" in refused(GRPO, "parallel.tp_size=2")


def test_prompts_over_the_limit_are_skipped_counted_and_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from megarl.trainer.inputs import read_inputs

    rows = [*ROWS, {"question": "long " * 60, "answer": "#### 1"}]
    path = write_rows(tmp_path / "train.jsonl", rows)
    config = cli.load([GRPO, f"train_dataset.path={path}"])
    inputs = read_inputs(config, rank=0)
    assert inputs.train is not None
    assert inputs.train.rows == len(ROWS)
    assert f"1 of {len(rows)} prompts over max_length 64 were skipped: row {len(ROWS)}" in caplog.text


def test_mistakes_in_mixed_streamed_and_measured_data_are_told_in_one_line(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    good, empty = write_rows(tmp_path / "good.jsonl", ROWS), tmp_path / "empty.jsonl"
    empty.write_text("")
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"messages": [{"role": "user", "content": "2+3?"}]}) + "\n")

    def mixed(*sources: str) -> str:
        return refused(GRPO, f"train_dataset.sources=[{','.join(sources)}]")

    one = f"{{path: {good}, weight: 1, label: one}}"
    assert "train_dataset.sources[1].weight=-2.0 must be at least 0" in mixed(one, f"{{path: {good}, weight: -2}}")
    assert "train_dataset.sources[1].weight=nan must be" in mixed(one, f"{{path: {good}, weight: nan}}")
    assert "train_dataset.sources have the weights [1.0, 0.0]" in mixed(one, f"{{path: {good}, weight: 0}}")
    assert "train_dataset.sources have the label 'one' 2 times" in mixed(one, one)
    assert f"source empty: data set {empty} is empty" in mixed(one, f"{{path: {empty}, weight: 1}}")
    other = f"{{path: {chats}, weight: 1, type: messages, name: ''}}"
    assert "source chats: rewards.functions: gsm8k cannot be called with the data's columns" in mixed(one, other)
    assert "pass@9 needs at least 9 samples" in refused(GRPO, "evaluator.pass_at=[9]")
    assert "valid_dataset.stream=true: an evaluation takes all" in refused(GRPO, "valid_dataset.stream=true")
    assert "a slice needs the number of rows" in refused(
        GRPO, "train_dataset.stream=true", "train_dataset.split='train[:9]'"
    )
    kto = refused("+experiment=kto", "train_dataset.stream=true")
    assert "KTO pairs each completion with one half a data set away, which a stream has no length for" in kto
    assert "set reference.mode=online" in refused("+experiment=dpo", "train_dataset.stream=true")
