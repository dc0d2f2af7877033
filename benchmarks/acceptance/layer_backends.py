"""Log-probs and gradients of a layer backend against torch's layers, both measured from torch's layers in float32.

    python benchmarks/acceptance/layer_backends.py [--candidate te bfloat16] [--hidden 512] [--layers 4]

All three engines load one random Qwen3. The candidate may be at most FACTOR times as far from float32 as torch's layers
in bfloat16. Exit code 1 if it is further.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # timing.py

import torch
from timing import machine, parse, record
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.actor.policy import MegatronPPOActor
from megarl.actor.weights import hf_weights
from megarl.algorithms import GRPO, GRPOConfig
from megarl.types import PackedBatch, cu_seqlens_of

FACTOR = 2.0
LENGTHS = (1, 7, 64, 129, 300)
REFERENCE, BASELINE = ("torch", "float32"), ("torch", "bfloat16")


def write_model(folder: Path, args: argparse.Namespace) -> None:
    head = min(128, args.hidden // 4)
    config = Qwen3Config(
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // head,
        num_key_value_heads=args.hidden // head // 2,
        head_dim=head,
        intermediate_size=3 * args.hidden,
        vocab_size=args.vocab,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def make_batch(vocab: int) -> PackedBatch:
    generator = torch.Generator().manual_seed(1)
    total = sum(LENGTHS)
    tokens = {
        "input_ids": torch.randint(0, vocab, (total,), generator=generator),
        "loss_mask": torch.rand(total, generator=generator) < 0.8,
    }
    return PackedBatch(cu_seqlens_of(torch.tensor(LENGTHS)), tokens, {})


def measure(folder: Path, batch: PackedBatch, backend: str, dtype: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs of the batch, and the gradient of their mean by the checkpoint's tensor names. Both on the host."""
    optimizer = OptimizerConfig(clip_grad=0.0)
    config = EngineConfig(path=str(folder), backend=backend, dtype=dtype, optimizer=optimizer)
    actor = MegatronPPOActor(config, GRPO(GRPOConfig()))
    actor.initialize()
    logprobs = actor.logprobs(batch)

    def loss(logprobs: Tensor, _: Tensor, data: PackedBatch) -> Tensor:
        return -(logprobs * data["loss_mask"]).sum() / data["loss_mask"].sum()

    actor.train_batch(batch, loss, lambda part: part["loss_mask"].sum(), loss_input="logprobs")
    with torch.no_grad():
        for parameter in hf_weights.parameters(actor.modules):
            parameter.copy_(parameter.main_grad)  # named_weights() then yields gradients by their names
    gradients = {name: tensor.float().cpu().clone() for name, tensor in actor.named_weights()}
    actor.destroy()
    return logprobs, gradients


def distances(one: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict[str, Tensor]]) -> dict[str, float]:
    """Mean |difference| of log-probs in nats, and the largest relative difference of a tensor's gradient."""
    relative = {name: float((one[1][name] - gradient).norm() / gradient.norm()) for name, gradient in other[1].items()}
    return {"log-probs": float((one[0] - other[0]).abs().mean()), "gradients": max(relative.values())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--candidate", nargs=2, default=("te", "bfloat16"), metavar=("BACKEND", "DTYPE"))
    for name, default in (("hidden", 512), ("layers", 4), ("vocab", 4096)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parse(parser)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"# {machine(device)}; hidden {args.hidden}, {args.layers} layers, sequences of {LENGTHS} tokens")
    with tempfile.TemporaryDirectory() as name:
        folder, batch = Path(name), make_batch(args.vocab)
        write_model(folder, args)
        reference = measure(folder, batch, *REFERENCE)
        candidate, baseline = (
            distances(measure(folder, batch, *side), reference) for side in (tuple(args.candidate), BASELINE)
        )
    further = False
    for what, unit in (("log-probs", "nats"), ("gradients", "share")):
        record(f"{what} from float32", candidate[what], unit, backend=args.candidate[0], dtype=args.candidate[1])
        record(f"{what} from float32", baseline[what], unit, backend="torch", dtype="bfloat16")
        worse = not candidate[what] <= FACTOR * baseline[what]  # NaN is worse too
        further |= worse
        line = f"{what}: {' '.join(args.candidate)} {candidate[what]:.2e}, torch bfloat16 {baseline[what]:.2e} {unit}"
        print(line + (f"; above {FACTOR:g} times that" if worse else ""))
    return int(further)


if __name__ == "__main__":
    sys.exit(main())
