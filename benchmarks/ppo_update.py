"""`ppo_update` and `compute_logp` against the same work with transformers, plain torch and padding, on one batch.

    OMP_NUM_THREADS=2 python benchmarks/ppo_update.py [--hidden 256] [--layers 4] [--vocab 32000] [--lora 8]

The batch: GRPO groups with long-tailed completions (log-normal lengths, cut at --max-new). The other side is written
as TRL's GRPO trainer does it: prompts padded on the left and completions on the right, `logits_to_keep` so that the
LM head sees completions only, sdpa attention, logsumexp and gather, AdamW fused. Its best configuration: sequences
sorted by length, each microbatch padded to its own longest and as large as megarl's, padding included. Both sides take
one optimizer step with the same loss. Tokens a second count real tokens. Also printed: how much of the padded tensors
is padding, and how unevenly ranks are loaded in the order of the batch and as megarl shares sequences out.

`--lora RANK` trains adapters of all linear layers, alpha twice the rank: `actor.lora` here, PEFT on the other side.

Where there is a GPU both sides run on it. With `--dtype bfloat16` the other side has its weights and Adam in bfloat16
alone, its fastest form. megarl keeps float32 ones beside them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from timing import machine, parse, record, side_by_side, with_warm_allocator
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from megarl.actor.batch.balance import SequenceCost, imbalance
from megarl.actor.batch.microbatch import partition
from megarl.actor.batch.shared_prefix import share
from megarl.actor.config import EngineConfig, LoraConfig, OptimizerConfig
from megarl.actor.policy import MegatronPPOActor
from megarl.algorithms import GRPO, GRPOConfig
from megarl.parallel import platform
from megarl.types import PackedBatch, cu_seqlens_of

EPS_CLIP = 0.2


def make_batch(args: argparse.Namespace, seed: int = 0) -> tuple[PackedBatch, Tensor, Tensor]:
    """The packed batch, prompt lengths and completion lengths `[num_seqs]`."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(args.prompts, generator=generator)
    prompts = (args.prompt * (0.4 * spread).exp()).clamp(8, 4 * args.prompt).long().repeat_interleave(args.samples)
    spread = torch.randn(args.prompts * args.samples, generator=generator)
    completions = (args.completion * spread.exp()).clamp(4, args.max_new).long()
    lengths = prompts + completions
    groups = torch.arange(args.prompts).repeat_interleave(args.samples)
    ids = [torch.randint(0, args.vocab, (int(n),), generator=generator) for n in lengths]
    for i in range(len(ids)):  # a group shares its prompt
        first = i - i % args.samples
        ids[i][: prompts[i]] = ids[first][: prompts[i]]
    position = torch.cat([torch.arange(int(n)) for n in lengths])
    tokens = {"input_ids": torch.cat(ids), "loss_mask": position >= prompts.repeat_interleave(lengths)}
    rewards = (torch.rand(len(ids), generator=generator) < 0.5).float()
    return PackedBatch(cu_seqlens_of(lengths), tokens, {"rewards": rewards, "group_ids": groups}), prompts, completions


class Padded:
    """The update in plain torch, one padded tensor a microbatch."""

    def __init__(self, folder: Path, batch: PackedBatch, prompts: Tensor, args: argparse.Namespace, by_length: bool):
        dtype = getattr(torch, args.dtype)
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=dtype)
        if args.lora:
            adapters = PeftConfig(r=args.lora, lora_alpha=2 * args.lora, target_modules="all-linear")
            model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
        self.model = model.to(platform.device())
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-6, weight_decay=0.0, fused=True)
        order = range(batch.num_seqs)
        if by_length:
            order = sorted(order, key=lambda i: -int(batch.lengths[i]))
        self.trained = batch["loss_mask"].sum()
        self.microbatches = [self._pad(batch, prompts, mb) for mb in self._cut(batch, prompts, list(order), args)]

    @staticmethod
    def _cut(batch: PackedBatch, prompts: Tensor, order: list[int], args: argparse.Namespace) -> Iterator[list[int]]:
        """As many sequences in a microbatch as fit with their padding."""
        completions, mb = batch.lengths - prompts, []
        for i in order:
            grown = [*mb, i]
            width = int(prompts[grown].max() + completions[grown].max())
            if mb and width * len(grown) > args.tokens:
                yield mb
                grown = [i]
            mb = grown
        yield mb

    @staticmethod
    def _pad(batch: PackedBatch, prompts: Tensor, members: list[int]) -> dict[str, Tensor]:
        left, right = int(prompts[members].max()), int((batch.lengths - prompts)[members].max())
        shape = (len(members), left + right)
        out = {
            "ids": torch.zeros(shape, dtype=torch.long),
            "real": torch.zeros(shape, dtype=torch.long),
            "mask": torch.zeros(len(members), right, dtype=torch.bool),
            "old": torch.zeros(len(members), right),
            "advantages": batch["advantages"][batch.cu_seqlens[1:].long() - 1][members],
            "members": torch.tensor(members),
        }
        for row, i in enumerate(members):
            start, stop = batch.cu_seqlens[i : i + 2].tolist()
            prompt = int(prompts[i])
            where = slice(left - prompt, left - prompt + stop - start)
            out["ids"][row, where] = batch["input_ids"][start:stop]
            out["real"][row, where] = 1
            out["mask"][row, : stop - start - prompt] = True
            out["old"][row, : stop - start - prompt] = batch["prox_logp"][start + prompt : stop]
        return {name: tensor.to(platform.device()) for name, tensor in out.items()}

    def waste(self) -> float:
        """The share of padding."""
        return 1 - sum(int(m["real"].sum()) for m in self.microbatches) / sum(
            m["ids"].numel() for m in self.microbatches
        )

    def _logits(self, mb: dict[str, Tensor]) -> Tensor:
        keep = mb["mask"].shape[1]
        positions = (mb["real"].cumsum(1) - 1).clamp(min=0)
        out = self.model(
            input_ids=mb["ids"],
            attention_mask=mb["real"],
            position_ids=positions,
            logits_to_keep=keep + 1,
            use_cache=False,
        )
        return out.logits[:, :-1]

    @staticmethod
    def _logprobs(logits: Tensor, mb: dict[str, Tensor]) -> Tensor:
        """TRL's selective_log_softmax: a row's logits at a time."""
        labels = mb["ids"][:, -logits.shape[1] :]
        if logits.dtype != torch.float32:
            rows = [row.log_softmax(-1).gather(-1, ids[:, None]) for row, ids in zip(logits, labels, strict=True)]
            return torch.stack(rows).squeeze(-1)
        chosen = logits.gather(-1, labels[..., None]).squeeze(-1)
        return chosen - torch.stack([row.logsumexp(-1) for row in logits])

    @torch.no_grad()
    def compute_logp(self) -> list[Tensor]:
        self.model.eval()
        return [self._logprobs(self._logits(mb), mb) for mb in self.microbatches]

    def update(self) -> float:
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for mb in self.microbatches:
            logits = self._logits(mb)
            logprobs = self._logprobs(logits, mb)
            with torch.no_grad():  # TRL logs the entropy as well
                table = torch.log_softmax(logits, -1)
                entropy = -(table.exp() * table).sum(-1)
                (entropy * mb["mask"]).sum()
            ratio = (logprobs - mb["old"]).exp()
            advantages = mb["advantages"][:, None]
            surrogate = torch.min(ratio * advantages, ratio.clamp(1 - EPS_CLIP, 1 + EPS_CLIP) * advantages)
            loss = -(surrogate * mb["mask"]).sum() / self.trained
            loss.backward()
            total += float(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return total


def actor_of(folder: Path, args: argparse.Namespace, shared_prefix: bool) -> MegatronPPOActor:
    config = EngineConfig(
        path=str(folder),
        dtype=args.dtype,
        max_tokens_per_mb=args.tokens,
        optimizer=OptimizerConfig(lr=1e-6, clip_grad=1.0),
        shared_prefix=shared_prefix,
        lora=LoraConfig(rank=args.lora, alpha=2.0 * args.lora) if args.lora else LoraConfig(),
    )
    actor = MegatronPPOActor(config, GRPO(GRPOConfig(eps_clip=EPS_CLIP)))
    actor.initialize()
    return actor


def report_balance() -> None:
    """Ranks' FLOPs over the mean for 512 long-tailed lengths on a model of 0.6B parameters, medians of 5 draws."""
    cost = SequenceCost.of(Qwen3Config(hidden_size=1024, num_hidden_layers=28, intermediate_size=3072))
    for ranks in (2, 4, 8, 16):
        found: dict[str, list[float]] = {"consecutive": [], "round robin": [], "megarl": []}
        for seed in range(5):
            draw = torch.randn(512, generator=torch.Generator().manual_seed(seed))
            lengths = (600 * draw.exp()).clamp(32, 8192).long().tolist()
            costs = [cost(n) for n in lengths]
            share_of = 512 // ranks
            found["consecutive"].append(imbalance([sum(costs[r * share_of :][:share_of]) for r in range(ranks)]))
            found["round robin"].append(imbalance([sum(costs[r::ranks]) for r in range(ranks)]))
            plan = partition(lengths, costs, ranks, 16384)
            found["megarl"].append(imbalance([sum(costs[i] for mb in rank for i in mb) for rank in plan]))
        figures = ", ".join(f"{name} {sorted(values)[2]:.1%}" for name, values in found.items())
        print(f"most loaded of {ranks} ranks over the mean: {figures}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("hidden", 256), ("layers", 4), ("vocab", 32000), ("prompts", 4), ("samples", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("prompt", 96), ("completion", 96), ("max-new", 1024), ("tokens", 4096), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: for a machine that others use")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parse(parser)
    folder = Path(tempfile.mkdtemp())
    config = Qwen3Config(
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=max(1, args.hidden // 128),
        head_dim=64,
        intermediate_size=3 * args.hidden,
        vocab_size=args.vocab,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    batch, prompts, completions = make_batch(args)
    actor = actor_of(folder, args, shared_prefix=False)
    batch["prox_logp"] = actor.compute_logp(batch)
    actor.compute_advantages(batch)
    padded = Padded(folder, batch, prompts, args, by_length=True)
    in_order = Padded(folder, batch, prompts, args, by_length=False)
    engines = {"megarl": actor, "megarl, shared_prefix": actor_of(folder, args, shared_prefix=True)}

    given = share(batch).source.numel() / batch.total_tokens
    device = platform.device().type
    print(f"# {machine(device)}; hidden {args.hidden}, {args.layers} layers, vocabulary {args.vocab}, {args.dtype}")
    longest, median = int(batch.lengths.max()), int(batch.lengths.median())
    print(
        f"{batch.num_seqs} sequences, {batch.total_tokens} tokens, {int(completions.sum())} of them trained;", end=" "
    )
    print(f"median {median}, longest {longest}; at most {args.tokens} tokens a microbatch")
    waste = f"{padded.waste():.1%} sorted by length, {in_order.waste():.1%} in the order of the batch"
    print(f"padding: {waste}; megarl none, {given:.1%} of the tokens with shared_prefix")
    report_balance()
    losses = {"padded": padded.update(), **{n: e.ppo_update(batch)["loss"] for n, e in engines.items()}}
    print("loss of the first update:", ", ".join(f"{n} {loss:.6f}" for n, loss in losses.items()))

    works: dict[str, dict[str, Callable[[], object]]] = {
        "ppo_update": {"padded": padded.update},
        "compute_logp": {"padded": padded.compute_logp},
    }
    for n, e in engines.items():
        works["ppo_update"][n] = lambda e=e: e.ppo_update(batch)
        works["compute_logp"][n] = lambda e=e: e.compute_logp(batch)
    clock = time.perf_counter if args.clock == "wall" else time.process_time
    for work, calls in works.items():
        seconds = side_by_side(calls, device=device, rounds=args.rounds, clock=clock)
        for name, value in seconds.items():
            speed, times = batch.total_tokens / value, seconds["padded"] / value
            record(f"{work} speed", speed, "tokens/s", device=device, side=name)
            record(f"{work} over padding", times, "x", device=device, side=name)
            print(f"{work:13s} {name:22s} {speed:8.0f} tokens/s  {times:5.2f}x padded", flush=True)


if __name__ == "__main__":
    with_warm_allocator()
    main()
