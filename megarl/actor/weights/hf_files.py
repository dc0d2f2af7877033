"""The files of a HF checkpoint: read box by box, written as sharded safetensors with config and tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig

from megarl.families import FAMILIES, moe_shape
from megarl.hub import local_folder
from megarl.knobs import UserError

MAX_FILE_BYTES = 5 * 2**30
TOKENIZER_FILES = ("tokenizer", "special_tokens", "vocab", "merges", "chat_template", "generation_config")


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies: in `file` as `name`, or as the rows from `row` on of entry `entry` of that."""

    file: Any
    name: str
    entry: int | None = None
    row: int = 0


class Checkpoint:
    """The safetensors files of a HF checkpoint, read box by box."""

    def __init__(self, path: str, config: PretrainedConfig) -> None:
        """`path` is a local folder or a hub name, which is fetched.

        Raises:
            UserError: see `local_folder`; or the folder holds no safetensors.
        """
        self.folder = local_folder(path)
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            files = sorted(p.name for p in self.folder.glob("*.safetensors"))
        missing = [f for f in files if not (self.folder / f).is_file()]
        if missing or not files:
            what = f"lacks {missing[0]}" if missing else "holds no *.safetensors"
            raise UserError(f"actor.path={path} {what}; give a HF checkpoint saved with save_pretrained")
        self._where: dict[str, Stored] = {}
        for file in files:
            opened = safe_open(self.folder / file, framework="pt")
            self._where.update({name: Stored(opened, name) for name in opened.keys()})  # noqa: SIM118 (not a dict)
        self._split_fused_experts(config)

    def _split_fused_experts(self, config: PretrainedConfig) -> None:
        """Names the experts one by one where transformers stored a layer's in one tensor.

        So does `save_pretrained(save_original_format=False)`: `mlp.experts.gate_up_proj [experts, 2 * width, hidden]`,
        gate rows first, and `mlp.experts.down_proj [experts, hidden, width]`.
        """
        called, moe = FAMILIES[config.model_type].experts, moe_shape(config)
        if called is None or moe is None:
            return
        for layer in (i for i, sparse in enumerate(moe.layers) if sparse):
            fused, plain = f"model.layers.{layer}.mlp", f"model.layers.{layer}.{called.block}"
            if (router := self._where.pop(f"{fused}.gate.weight", None)) is not None:
                self._where[f"{plain}.gate.weight"] = router
            for stored, parts in (("gate_up_proj", (called.gate, called.up)), ("down_proj", (called.down,))):
                whole = self._where.pop(f"{fused}.experts.{stored}", None)
                if whole is None:
                    continue
                for expert in range(moe.experts):
                    for i, part in enumerate(parts):
                        self._where[f"{plain}.experts.{expert}.{part}.weight"] = Stored(
                            whole.file, whole.name, expert, i * moe.width
                        )

    def names(self) -> set[str]:
        return set(self._where)

    def read(self, name: str, shape: tuple[int, ...], box: tuple[slice, ...]) -> Tensor:
        """The elements of a box of the tensor, which must have `shape`.

        Raises:
            UserError: it has another shape.
        """
        stored = self._where[name]
        part = stored.file.get_slice(stored.name)
        found = tuple(part.get_shape())
        if stored.entry is None and found != shape:
            raise UserError(f"{self.folder}: {name} has shape {found}, the config asks for {shape}")
        if stored.entry is None:
            return part[box]
        rows = slice(stored.row + box[0].start, stored.row + box[0].stop)
        if len(found) != 3 or stored.entry >= found[0] or rows.stop > found[1] or found[2] != shape[1]:
            raise UserError(f"{self.folder}: {stored.name} has shape {found}, the config asks for {shape} an expert")
        return part[(slice(stored.entry, stored.entry + 1), rows, *box[1:])][0]


def write(folder: Path, tensors: Iterable[tuple[str, Tensor]], config: PretrainedConfig, source: Path) -> None:
    """Writes a HF checkpoint to `folder`, holding at most one file's tensors; the tokenizer is that of `source`."""
    index: dict[str, str] = {}
    held: dict[str, Tensor] = {}
    files: list[str] = []
    total = 0

    def flush() -> None:
        if held:
            files.append(f"part-{len(files):05d}.safetensors")
            save_file(held, folder / files[-1], metadata={"format": "pt"})
            (folder / files[-1]).chmod(0o644)  # written for its owner alone
            index.update(dict.fromkeys(held, files[-1]))
            held.clear()

    folder.mkdir(parents=True, exist_ok=True)
    for name, tensor in tensors:
        if sum(t.nbytes for t in held.values()) + tensor.nbytes > MAX_FILE_BYTES:
            flush()
        held[name] = tensor
        total += tensor.nbytes
    flush()
    _name_files(folder, files, index, total)
    write_small_files(folder, config, source)


def write_small_files(folder: Path, config: PretrainedConfig, source: Path) -> None:
    """Writes what is no tensor: the config, and the tokenizer files of `source`."""
    config.save_pretrained(folder)
    for file in source.iterdir():
        if file.name.startswith(TOKENIZER_FILES):
            shutil.copyfile(file, folder / file.name)


def _name_files(folder: Path, files: list[str], index: dict[str, str], total: int) -> None:
    """Gives the written parts the names of the HF convention, with an index where there are several."""
    if len(files) == 1:
        (folder / files[0]).rename(folder / "model.safetensors")
        return
    names = {f: f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i, f in enumerate(files)}
    for old, new in names.items():
        (folder / old).rename(folder / new)
    weight_map = {name: names[file] for name, file in index.items()}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    )
