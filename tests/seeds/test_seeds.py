"""The documents of other trainers run as printed; README.md lists the lines that had to change."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl import cli
from megarl.areal import extract_answer, process_results
from megarl.axolotl.read import read_axolotl
from megarl.observe.run_folder import RunFolder
from megarl.rollout.servers.sglang_server import still_running
from tests.e2e.test_main_job import NOISE, Command

HERE = Path(__file__).parent
SCRIPTS = ("areal_grpo.py", "areal_sft.py", "areal_remax.py", "rewards.py")
FEW = ("total_train_steps=2", "actor.optimizer.lr_decay_style=constant", "actor.optimizer.warmup_steps=0")
RL = ("+experiment=gsm8k_grpo", *FEW, "algorithm.n_minibatches=1", "train_dataset.batch_size=8")
GRPO: dict[str, Any] = {
    "rl": "grpo", "base_model": "assets/tiny", "max_steps": 1, "micro_batch_size": 8, "learning_rate": 1e-5,
    "trl": {"beta": 0.001, "max_completion_length": 16, "use_vllm": True, "num_generations": 4,
            "reward_funcs": ["tests.seeds.rewards.rand_reward_func"], "reward_weights": [1.0]},
    "datasets": [{"path": "arithmetic", "type": "tests.seeds.rewards.oai_gsm8k_transform"}],
}  # fmt: skip


def test_every_changed_line_is_in_the_list() -> None:
    listed = (HERE / "README.md").read_text()
    for name in SCRIPTS:
        changed = {
            line.split("  # changed")[0].strip()
            for line in (HERE / name).read_text().splitlines()
            if line.endswith("# changed")
        }
        assert changed, name
        for line in changed:
            assert f"| `{name}` | `{line}`" in listed, (name, line)


def test_answers_are_extracted_and_compared() -> None:
    assert extract_answer("so it is 12, and 1,200", data_name="math") == "1200"
    assert extract_answer(r"\boxed{\frac{1}{2}} of 7", data_name="math") == r"\frac{1}{2}"
    assert process_results("#### 0.5", r"\boxed{\frac{1}{2}}")[0] == 1
    assert process_results("none", "#### 5") == (0, (None, "5"))


@pytest.mark.parametrize("given", [{"rl": "gdpo"}, {"trl": {**GRPO["trl"], "loss_type": "dr_grpo"}}, {}])
def test_axolotls_grpo_pages_are_read(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    server = {
        "host": "0.0.0.0",
        "port": 8000,
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.85,
        "dtype": "auto",
    }
    file = tmp_path / "grpo.yaml"
    file.write_text(yaml.safe_dump({**GRPO, "vllm": server, **given}))
    config = cli.composed(read_axolotl(str(file)).overrides)
    assert config.rewards.functions == ["tests.seeds.rewards.rand_reward_func"]
    assert (config.server.host, config.server.port, config.server.tp_size) == ("127.0.0.1", 8000, 2)


def run(root: Path, script: str, *arguments: str) -> tuple[str, list[list[float]]]:
    """Runs a script by the local launcher. Returns its output, and the figures of each rank and step."""
    command = Command(root, str(HERE / script), *arguments, module="megarl.launcher.local")
    code = command.wait()
    text = command.output.read_text()
    assert code == 0, text[-4000:]
    assert not NOISE.search(text)
    folder = RunFolder(next(root.glob("*/latest")).resolve()).path
    rows = [line.split() for file in sorted(folder.glob("seed_rank_*.txt")) for line in file.read_text().splitlines()]
    return text, [[float(value == "True") if value in ("True", "False") else float(value) for value in r] for r in rows]


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"epoch \d+ step \d+ loss ([\d.]+)", text)]


@pytest.mark.long
def test_sft_on_one_rank_and_on_two_has_the_same_losses(tmp_path: Path) -> None:
    arguments = ("+experiment=gsm8k_sft", *FEW, "train_dataset.batch_size=8")
    alone = losses(run(tmp_path / "one", "areal_sft.py", *arguments)[0])
    shared = losses(run(tmp_path / "two", "areal_sft.py", *arguments, "parallel.dp_size=2")[0])
    assert len(alone) == 2
    assert alone[1] < alone[0]
    assert shared == pytest.approx(alone, abs=2e-6)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Servers of `python -m megarl.serve`, whose addresses and key are in the environment."""
    root = tmp_path_factory.mktemp("serve")
    command = Command(root, "+experiment=gsm8k_grpo", module="megarl.serve")
    command.wait_for(lambda: "Ctrl-C ends them" in command.output.read_text(), "address")
    file = Path(re.findall(r"source (\S+)", command.output.read_text())[0])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in re.findall(r"export (\w+)=(\S+)", file.read_text()):
            patch.setenv(name, value)
        yield file
    family = command.family()
    command.process.send_signal(signal.SIGINT)
    assert command.wait() == 0, command.output.read_text()[-3000:]
    assert still_running(family, 300) == []


def test_grpo_as_printed_trains_beside_served_servers(served: Path, tmp_path: Path) -> None:
    assert served.stat().st_mode & 0o777 == 0o600
    _, rows = run(tmp_path, "areal_grpo.py", *RL, "algorithm.kl_coef=0.01")
    assert [row[:2] for row in rows] == [[1, 0], [2, 1]]  # versions: the engine's, and the newest token's
    assert all(row[2] < 1e-4 for row in rows)  # rollout and trainer agree before and after the weight sync
    assert all(row[4] > 0 for row in rows)
    assert all(row[6] == 1 for row in rows)  # with the reference


@pytest.mark.long
def test_the_custom_algorithm_reuses_the_server_at_a_later_version(served: Path, tmp_path: Path) -> None:
    text, _ = run(tmp_path / "remax", "areal_remax.py", *RL)
    steps = re.findall(r"step (\d) version (\d+) norm ([\d.]+)", text)
    assert [int(step) for step, _, _ in steps] == [0, 1]
    assert int(steps[1][1]) == int(steps[0][1]) + 1
    assert max(float(norm) for _, _, norm in steps) > 0
    _, rows = run(tmp_path / "two", "areal_grpo.py", *RL, "parallel.dp_size=2", "rollout.max_head_offpolicyness=1")
    assert len(rows) == 4  # two ranks, two steps, each with its own half
    assert all(row[5] == 8 // 2 * 8 for row in rows)
    assert all(row[2] < 1e-4 for row in (rows[0], rows[2]))  # the start weights were brought to the server
    assert [row[3] for row in rows[:2]] == [row[3] for row in rows[2:]]


@pytest.mark.long
def test_axolotls_rollout_function_trains_as_printed(tmp_path: Path) -> None:
    values = {
        **GRPO,
        "trl": {**GRPO["trl"], "rollout_func": "tests.seeds.math_env.math_solver_rollout",
                "reward_funcs": ["tests.seeds.math_env.math_reward"]},
        "datasets": [{"path": "arithmetic", "type": "tests.seeds.math_env.math_transform"}],
        "max_prompt_len": 128,  # the page's 512 leave no room in the bundled model's 512 positions
    }  # fmt: skip
    file = tmp_path / "grpo.yaml"
    file.write_text(yaml.safe_dump(values))
    command = Command(tmp_path / "run", "--from-axolotl", str(file), "--num-processes", "2")
    assert command.wait() == 0, command.output.read_text()[-4000:]
    assert "dp_size: 2" in RunFolder(next((tmp_path / "run").glob("*/latest"))).config.read_text()
