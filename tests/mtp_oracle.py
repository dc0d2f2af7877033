"""Layers of multi-token prediction for tests: random ones in a checkpoint, and their loss in float64 by plain torch.

Eq. 21 to 25 of DeepSeek-V3 (arXiv:2412.19437), with the decoder layer of transformers. Sequences are computed one by
one, so nothing can cross their ends. Names are those of the published checkpoints.
"""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl.types import PackedBatch

UNDER_MTP = {
    "embedding_norm": "mtp.pre_fc_norm_embedding.weight",
    "hidden_norm": "mtp.pre_fc_norm_hidden.weight",
    "projection": "mtp.fc.weight",
    "final_norm": "mtp.norm.weight",
    "prefix": "mtp.layers.0.",
}


def numbered(prefix: str) -> dict[str, str]:
    """Names of DeepSeek's and GLM's tensors."""
    return {
        "embedding_norm": f"{prefix}enorm.weight",
        "hidden_norm": f"{prefix}hnorm.weight",
        "projection": f"{prefix}eh_proj.weight",
        "final_norm": f"{prefix}shared_head.norm.weight",
        "prefix": prefix,
    }


def names_of(folder: Path) -> list[dict[str, str]]:
    """Names of a checkpoint's tensors around the layer of each depth."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"].startswith("qwen"):
        return [UNDER_MTP]
    first = config["num_hidden_layers"]
    return [numbered(f"model.layers.{first + i}.") for i in range(config["num_nextn_predict_layers"])]


def add_layers(source: Path, folder: Path, depths: int = 1) -> Path:
    """Copies a checkpoint with layers of multi-token prediction more, shaped as the last layer, with random values.

    DeepSeek's and GLM's repeat the embedding and the head.
    """
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    if not config["model_type"].startswith("qwen"):
        (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": depths}))
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(5)
    made = {}
    for names in names_of(folder):
        made |= _layer(tensors, config, names, generator)
    save_file({**tensors, **made}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _layer(
    tensors: dict[str, Tensor], config: dict[str, Any], names: dict[str, str], generator: torch.Generator
) -> dict[str, Tensor]:
    last, hidden = f"model.layers.{config['num_hidden_layers'] - 1}.", config["hidden_size"]
    shapes = {names["prefix"] + n.removeprefix(last): t.shape for n, t in tensors.items() if n.startswith(last)}
    shapes |= {names[kind]: (hidden,) for kind in ("embedding_norm", "hidden_norm", "final_norm")}
    shapes[names["projection"]] = (hidden, 2 * hidden)
    made = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    if names is UNDER_MTP:
        return made
    made |= {name: tensor + 1 for name, tensor in made.items() if "norm" in name}
    made[f"{names['prefix']}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    made[f"{names['prefix']}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return made


class Oracle:
    """Loss of a checkpoint's layers of multi-token prediction, and its gradients, in float64."""

    def __init__(self, folder: Path) -> None:
        tensors = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        ).requires_grad_(False)
        self.names = names_of(folder)
        self.zero_centered = self.names[0] is UNDER_MTP
        self.layers = [self._layer(tensors, names["prefix"]) for names in self.names]
        self.around = [
            {kind: tensors[names[kind]].requires_grad_(True) for kind in names if kind != "prefix"}
            for names in self.names
        ]

    def _layer(self, tensors: dict[str, Tensor], prefix: str) -> torch.nn.Module:
        """Transformers' layer, which has all experts in one tensor."""
        config = self.model.config
        layer = type(self.model.model.layers[-1])(config, config.num_hidden_layers - 1).double()
        own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        state = {}
        for key, target in layer.state_dict().items():
            if key in own:
                state[key] = own[key]
                continue
            experts, part = key.rsplit(".", 1)
            parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
            state[key] = torch.stack(
                [torch.cat([own[f"{experts}.{e}.{p}.weight"] for p in parts]) for e in range(len(target))]
            )
        layer.load_state_dict(state)
        return layer

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        gain = weight + (1.0 if self.zero_centered else 0.0)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.model.config.rms_norm_eps) * gain

    def logprobs(self, ids: Tensor) -> list[Tensor]:
        """By depth d: log-probs of tokens d + 1 on of one sequence. Entry i is read with token i + d."""
        decoder, result = self.model.model, []
        hidden = decoder(ids[None]).last_hidden_state
        for depth, (around, layer) in enumerate(zip(self.around, self.layers, strict=True), start=1):
            length = len(ids) - depth
            if length < 2:
                result.append(torch.zeros(0, dtype=torch.float64))
                continue
            embedded = self._norm(decoder.embed_tokens(ids[None, depth:]), around["embedding_norm"])
            joined = torch.cat([embedded, self._norm(hidden[:, :length], around["hidden_norm"])], dim=-1)
            x, positions = joined @ around["projection"].t(), torch.arange(length)[None]
            mask = torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)[None, None]
            angles = decoder.rotary_emb(x, positions)
            out = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=angles)
            hidden = self._norm(out[0] if isinstance(out, tuple) else out, around["final_norm"])
            table = self.model.lm_head(hidden)[0, :-1].log_softmax(-1)
            result.append(table.gather(1, ids[depth + 1 :, None])[:, 0])
        return result

    def loss(self, batch: PackedBatch) -> Tensor:
        """Mean over depths of the mean negative log-prob of the trained tokens of a packed batch, in nats."""
        ids, mask, depths = batch["input_ids"], batch["loss_mask"].bool(), len(self.layers)
        totals, counts = [torch.zeros([], dtype=torch.float64) for _ in range(depths)], [0] * depths
        for start, stop in itertools.pairwise(batch.cu_seqlens.tolist()):
            for i, logprobs in enumerate(self.logprobs(ids[start:stop])):
                trained = mask[start + i + 2 : stop]
                totals[i] = totals[i] - logprobs[trained].sum()
                counts[i] += int(trained.sum())
        return torch.stack([total / count for total, count in zip(totals, counts, strict=True)]).mean()

    def gradients(self, batch: PackedBatch) -> dict[str, Tensor]:
        """Gradients of the loss by names of the checkpoint."""
        self.loss(batch).backward()
        result = {}
        for names, around, layer in zip(self.names, self.around, self.layers, strict=True):
            result |= {names[kind]: tensor.grad for kind, tensor in around.items()}
            result |= {names["prefix"] + key: parameter.grad for key, parameter in layer.named_parameters()}
        return flat({name: grad for name, grad in result.items() if grad is not None})


def flat(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with experts one by one, where a checkpoint or transformers has all of a layer in one."""
    result = {}
    for name, tensor in tensors.items():
        experts, _, part = name.rpartition(".")
        if part not in ("gate_up_proj", "down_proj"):
            result[name] = tensor
            continue
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
        for e, expert in enumerate(tensor):
            halves = zip(parts, expert.chunk(len(parts)), strict=True)
            result |= {f"{experts}.{e}.{p}.weight": half for p, half in halves}
    return result
