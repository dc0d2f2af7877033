"""Megatron trainers of every layout push to real SGLang servers of one and two ranks, while requests are in flight."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from safetensors.torch import load_file
from test_weights import expected_checksums
from transformers import AutoModelForCausalLM
from weights_support import TOLERANCE, Served, logprobs

from megarl.reshard.store import Deadline
from megarl.rollout.sglang_server import SGLangServers

WORKER = Path(__file__).with_name("weights_rank.py")
DEADLINE_S = 150


class Trainer:
    """The ranks of a trainer, as processes."""

    def __init__(self, folder: Path, ranks: int, **settings: Any):
        self.exported = folder / "exported"
        path = folder / "settings.json"
        path.write_text(json.dumps({"family": "qwen3", "exported": str(self.exported), **settings}))
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = str(probe.getsockname()[1])
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
        shared["PYTHONPATH"] = str(WORKER.parents[2])
        self.logs = [folder / f"rank_{rank}.log" for rank in range(ranks)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            with log.open("w") as errors:
                process = subprocess.Popen(
                    [sys.executable, str(WORKER), str(path)],
                    env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            self.processes.append(process)

    def lines(self) -> list[list[Any]]:
        """What each rank printed, once all have ended."""
        try:
            outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        assert all(outputs), "\n".join(log.read_text()[-3000:] for log in self.logs)
        return [[json.loads(line) for line in output.splitlines() if line[:1] in "[{"] for output in outputs]


LAYOUTS: dict[str, tuple[int, dict[str, int], int]] = {  # ranks, knobs, syncs
    "tp1": (1, {}, 4),
    "tp2": (2, {"tp_size": 2}, 4),
    "pp2": (2, {"pp_size": 2}, 4),
    "dp2": (2, {"dp_size": 2}, 4),
    "cp2": (2, {"cp_size": 2}, 4),
    "tp2-pp2": (4, {"tp_size": 2, "pp_size": 2}, 20),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_servers_hold_the_export_bit_for_bit_and_answer_by_the_version_they_name(
    layout: str, fleet: SGLangServers, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    ranks, knobs, syncs = LAYOUTS[layout]
    served = Served(fleet, 3)
    first = served.version + 1
    versions = list(range(first, first + syncs))
    served.session.close()
    trainer = Trainer(
        tmp_path,
        ranks,
        checkpoint=str(tiny_checkpoint("qwen3")),
        layout=knobs,
        addresses=fleet.addresses,
        api_key=fleet.api_key,
        versions=versions,
        reshard={"bucket_bytes": 65536, "control_deadline_s": 30, "transfer_deadline_s": 60},
    )
    answers: list[dict[str, Any]] = []
    stop = threading.Event()

    def ask(server: int) -> None:
        while not stop.is_set():
            answers.append(served.generate(60, list(range(10 + server, 30 + server)), server))

    threads = [threading.Thread(target=ask, args=(server,)) for server in (0, 2)]
    for thread in threads:
        thread.start()
    try:
        lines = trainer.lines()
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)

    assert [[line[0] for line in rank] for rank in lines] == [versions] * ranks
    weights = load_file(trainer.exported / "model.safetensors")
    last = make_model("qwen3", True, versions[-1])
    assert {name: tensor.equal(last.state_dict()[name]) for name, tensor in weights.items()} == dict.fromkeys(
        weights, True
    )
    for server, size in ((0, 1), (1, 1), (2, 2)):
        held = served.control(server).checksums(Deadline(20))
        assert held == [expected_checksums(weights, rank, size) for rank in range(size)]
        assert served.difference(last, server) < TOLERANCE
    whole = sum(tensor.numel() * 4 for tensor in weights.values())
    assert all(3 * whole <= line[1] < 3.02 * whole for line in lines[0])  # norms alone are held twice at tp 2
    check_spans(answers, set(versions))


@pytest.mark.timeout(300)
def test_experts_of_a_trainer_with_expert_parallelism_reach_a_server_that_cuts_them_by_tensor_parallelism(
    serve: Callable[..., SGLangServers], tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint("qwen3_moe", tied=False)
    served = Served(serve(checkpoint, tp_size=2))
    trainer = Trainer(
        tmp_path,
        2,
        family="qwen3_moe",
        checkpoint=str(checkpoint),
        layout={"dp_size": 2, "ep_size": 2},
        addresses=served.addresses,
        api_key=served.servers.api_key,
        versions=[1, 2, 3],
        reshard={"bucket_bytes": 65536, "control_deadline_s": 30, "transfer_deadline_s": 60},
    )
    first, second = trainer.lines()
    assert [line[0] for line in first] == [line[0] for line in second] == [1, 2, 3]
    model = AutoModelForCausalLM.from_pretrained(trainer.exported, dtype=torch.float32).eval()
    assert served.difference(model) < TOLERANCE
    served.servers.stop()


def check_spans(answers: list[dict[str, Any]], pushed: set[int]) -> None:
    """Every token that a pushed version answered has the log-prob that transformers gives it under that version."""
    seen = set()
    for answer in answers:
        meta = answer["meta_info"]
        prompt = [token for _, token, _ in meta["input_token_logprobs"]]
        output = torch.tensor([value for value, _, _ in meta["output_token_logprobs"]])
        for span in meta["weight_versions"]:
            version = int(span["version"])
            if version in pushed:
                seen.add(version)
                expected = logprobs(make_model("qwen3", True, version), prompt + answer["output_ids"])[
                    len(prompt) - 1 :
                ]
                part = slice(span["start"], span["end"])
                torch.testing.assert_close(output[part], expected[part], atol=TOLERANCE, rtol=0)
    assert len(seen) > len(pushed) // 2, f"of {sorted(pushed)} only {sorted(seen)} answered a request"
