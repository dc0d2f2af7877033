"""The files of a HF checkpoint: whole tensors in, sharded safetensors with config and tokenizer out. No Megatron."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig

MAX_FILE_BYTES = 5 * 2**30
TOKENIZER_FILES = ("tokenizer", "special_tokens", "vocab", "merges", "chat_template", "generation_config")


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
