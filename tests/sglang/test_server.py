"""A real SGLang server on CPU: it answers, guards its endpoints, reports its failures, and outlives nobody."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.knobs import UserError
from megarl.rollout.servers import sglang_server
from megarl.rollout.servers.server_config import SGLangServerConfig
from megarl.rollout.servers.sglang_server import ServerError, SGLangServers, still_running

# A trainer that starts a server, prints its process id and then only waits.
TRAINER = """
import sys, time
from megarl.rollout.servers.server_config import SGLangServerConfig
from megarl.rollout.servers.sglang_server import SGLangServers
servers = SGLangServers(SGLangServerConfig(device="cpu", max_total_tokens=4096), sys.argv[1], sys.argv[2])
servers.start()
print(servers.servers[0].process.pid, flush=True)
if sys.argv[3] == "ready":
    servers.wait_ready()
    print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def warm_servers() -> None:
    """Servers of this module begin as `python -m` does."""


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServers]:
    config = SGLangServerConfig(device="cpu", max_total_tokens=16384)
    with SGLangServers(config, tiny_checkpoint("qwen3"), tmp_path_factory.mktemp("logs")) as servers:
        servers.start()
        servers.wait_ready()
        yield servers


def post(servers: SGLangServers, path: str, body: dict[str, Any], key: str | None = None) -> Any:
    request = urllib.request.Request(
        f"http://{servers.addresses[0]}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {key or servers.api_key}"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def test_a_served_logprob_equals_transformers(server: SGLangServers, tiny_checkpoint: Callable[..., Path]) -> None:
    prompt = list(range(5, 25))
    answer = post(
        server,
        "/generate",
        {"input_ids": prompt, "return_logprob": True, "sampling_params": {"max_new_tokens": 12, "temperature": 1.0}},
    )
    tokens = answer["output_ids"]
    served = torch.tensor([logprob for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]])
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint("qwen3"), dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(served, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("path", ["/generate", "/pause_generation", "/begin_weight_update", "/update_weight_version"])
def test_an_endpoint_refuses_a_wrong_key(server: SGLangServers, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="401"):
        post(server, path, {}, key="not-the-key")


def test_the_key_shows_in_no_command_line_and_no_file_others_can_read(server: SGLangServers) -> None:
    process = server.servers[0].process
    assert process is not None
    root = psutil.Process(process.pid)
    for member in [root, *root.children(recursive=True)]:
        assert server.api_key not in " ".join(member.cmdline())
    for path in (server.servers[0].args_path, server.servers[0].log_path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_server_listens_on_the_loopback_address_alone(server: SGLangServers) -> None:
    process = server.servers[0].process
    assert process is not None
    root = psutil.Process(process.pid)
    listening = {
        connection.laddr.ip
        for member in [root, *root.children(recursive=True)]
        for connection in member.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening <= {"127.0.0.1", "::1"}


@pytest.mark.parametrize("moment", [pytest.param("at once", marks=pytest.mark.long), "ready"])
def test_no_process_survives_a_killed_trainer(
    moment: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", TRAINER, str(tiny_checkpoint("qwen3")), str(tmp_path), moment]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    root = psutil.Process(int(trainer.stdout.readline()))
    if moment == "ready":
        assert trainer.stdout.readline() == "ready\n"
    family = [root, *root.children(recursive=True)]
    assert len(family) >= (3 if moment == "ready" else 1)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait(300)
    trainer.stdout.close()
    assert still_running(family, 120) == []


@pytest.mark.long
def test_stop_ends_all_processes_and_removes_the_scratch_folder(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    servers = SGLangServers(SGLangServerConfig(device="cpu", max_total_tokens=4096), tiny_checkpoint("qwen3"), tmp_path)
    with servers:
        servers.start()
        servers.wait_ready()
        server = servers.servers[0]
        assert server.process is not None
        assert server.scratch is not None
        scratch = Path(server.scratch)
        root = psutil.Process(server.process.pid)
        family = [root, *root.children(recursive=True)]
        assert len(family) >= 3
        servers.check_alive()
    assert still_running(family, 0) == []
    assert not scratch.exists()


def test_a_server_that_fails_names_its_log_and_shows_the_end_of_it(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    config = SGLangServerConfig(device="cpu", max_total_tokens=4096)
    backend = {"attention_backend": "no_such_backend"}
    with SGLangServers(config, tiny_checkpoint("qwen3"), tmp_path, sglang=backend) as servers:
        servers.start()
        with pytest.raises(ServerError, match="invalid choice: 'no_such_backend'") as failure:
            servers.wait_ready()
    assert str(tmp_path / "sglang-0.log") in str(failure.value)


def test_a_server_that_misses_its_deadline_is_stopped(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    config = SGLangServerConfig(device="cpu", max_total_tokens=4096, ready_timeout_s=0.5)
    servers = SGLangServers(config, tiny_checkpoint("qwen3"), tmp_path)
    servers.start()
    process = servers.servers[0].process
    assert process is not None
    with pytest.raises(ServerError, match=r"ready_timeout_s=0\.5"):
        servers.wait_ready()
    assert process.poll() is not None


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"sglang": {"attention_backnd": "x"}}, "did you mean attention_backend"),
        ({"sglang": {"pp_size": 2}}, "live weight updates do not support pipeline"),
        ({"sglang": {"dp_size": 2}}, "use the knob n_servers"),
        ({"sglang": {"tp_size": 2}}, "use the knob tp_size"),
        ({"tp_size": 0}, "tp_size=0 must be at least 1"),
        ({"device": "gpu"}, "one of auto, cpu, cuda"),
    ],
)
def test_a_wrong_knob_is_refused_before_anything_starts(
    knobs: dict[str, Any], message: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    passed_through = knobs.get("sglang", {})
    config = {key: value for key, value in knobs.items() if key != "sglang"}
    model = tiny_checkpoint("qwen3")
    with pytest.raises(UserError, match=message):
        SGLangServers(SGLangServerConfig(**config), model, tmp_path, sglang=passed_through)


def test_a_missing_model_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere is not a model folder"):
        SGLangServers(SGLangServerConfig(), tmp_path / "nowhere", tmp_path)


def test_a_port_in_use_is_refused(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} on 127.0.0.1 is in use"):
            SGLangServers(SGLangServerConfig(port=port), tiny_checkpoint("qwen3"), tmp_path)


def test_a_missing_sglang_is_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not os.path.isdir(os.path.join(p, "sglang"))])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    sglang_server.server_arg_options.cache_clear()
    with pytest.raises(UserError, match="make setup"):
        SGLangServers(SGLangServerConfig(), tiny_checkpoint("qwen3"), tmp_path)
