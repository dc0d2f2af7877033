"""Tokens a second of SGLang's decode on CPU: its own, with our attention, with steps of ours, with several at once.

`python benchmarks/sglang_decode.py`: four servers of the same 4.5M-parameter model, asked in turn for 64 completions.
`--clock cpu` counts the servers' processor time, for a machine that others use as well. Then all are asked for the
same greedy completions, and how far the log-probs of their tokens are apart is printed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import torch
from timing import machine, side_by_side, with_warm_allocator
from transformers import AutoModelForCausalLM, Qwen3Config

from megarl.data.tokenizer import write_tokenizer
from megarl.rollout.servers.server_config import SGLangServerConfig
from megarl.rollout.servers.sglang_server import SGLangServers

BATCH, PROMPT_TOKENS, NEW_TOKENS = 64, 32, 64
# The modules of `megarl.cpu.sglang_models` that SGLang then skips, and whether it takes several steps at once.
SIDES = {
    "SGLang's own": ("batched_decode,dense,fused_step", False),
    "our attention": ("dense,fused_step", False),
    "our steps": ("", False),
    "several of them": ("", True),
}


def write_model(folder: Path) -> None:
    """A random Qwen3 of 4.5M parameters with the bundled tokenizer."""
    config = Qwen3Config(
        hidden_size=256, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
        intermediate_size=704, vocab_size=360, tie_word_embeddings=True, max_position_embeddings=512, eos_token_id=0,
        bos_token_id=None, pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    write_tokenizer(folder)


def start(name: str, root: Path, skipped: str, several: bool) -> SGLangServers:
    (root / name).mkdir()
    config = SGLangServerConfig(device="cpu", max_total_tokens=16384)
    servers = SGLangServers(config, root / "model", root / name)
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = skipped
    if not several:
        for name in ("speculative_algorithm", "speculative_num_draft_tokens"):
            del servers.servers[0].args[name]
    servers.start()
    return servers


def generate(servers: SGLangServers, temperature: float = 1.0) -> Any:
    prompts = [[5 + (7 * i + j) % 340 for j in range(PROMPT_TOKENS)] for i in range(BATCH)]
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": temperature, "ignore_eos": True}
    body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {servers.api_key}"}
    request = urllib.request.Request(f"http://{servers.addresses[0]}/generate", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def apart(own: SGLangServers, ours: SGLangServers) -> tuple[float, int]:
    """The largest difference of log-probs of greedy completions, and over how many tokens: up to the first where the
    two sides' choices differ, as they may where two tokens are all but equal."""
    largest, compared = 0.0, 0
    for one, other in zip(generate(own, 0.0), generate(ours, 0.0), strict=True):
        pairs = zip(*(side["meta_info"]["output_token_logprobs"] for side in (one, other)), strict=True)
        for (mine, token, _), (theirs, chosen, _) in pairs:
            if token != chosen:
                break
            largest, compared = max(largest, abs(mine - theirs)), compared + 1
    return largest, compared


def processor_seconds(servers: SGLangServers) -> float:
    process = servers.servers[0].process
    assert process is not None, "started"
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    return sum(sum(member.cpu_times()[:2]) for member in family)


def main() -> None:
    with_warm_allocator()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_model(root / "model")
        servers = {name: start(name, root, *side) for name, side in SIDES.items()}
        clocks = {"wall": time.perf_counter, "cpu": lambda: sum(processor_seconds(s) for s in servers.values())}
        try:
            for side in servers.values():
                side.wait_ready()
            calls = {name: functools.partial(generate, side) for name, side in servers.items()}
            seconds = side_by_side(calls, rounds=5, clock=clocks[args.clock])
            own, *ours = servers
            differences = {name: apart(servers[own], servers[name]) for name in ours}
        finally:
            for side in servers.values():
                side.stop()
    print(
        f"{machine('cpu')}; {BATCH} completions of {NEW_TOKENS} tokens, medians of 5 rounds in turn, {args.clock} time"
    )
    for name, value in seconds.items():
        print(f"  {name:13s} {value:6.2f} s  {BATCH * NEW_TOKENS / value:7.0f} tokens/s")
    for name, (largest, compared) in differences.items():
        print(f"  {name}: {seconds[own] / seconds[name]:.2f} x SGLang's tokens/s (goal 1.3), ", end="")
        print(f"log-probs of {compared} greedy tokens at most {largest:.1e} apart (goal 5e-6)")


if __name__ == "__main__":
    main()
