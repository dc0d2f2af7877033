"""Files of a HF checkpoint: read box by box, written as sharded safetensors beside all other files of its source."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig

from megarl.actor.weights import saved_file
from megarl.actor.weights.block_fp8 import BlockFp8, pair
from megarl.actor.weights.fused_experts import ExpertSlice, fuse, split
from megarl.actor.weights.repeated_tensors import repeated
from megarl.actor.weights.shards import tensor_shapes
from megarl.actor.weights.source_format import config_fields, plain_name, restored, write_config
from megarl.families import carried_prefixes, decoder, is_scalar
from megarl.families.blocks import Experts
from megarl.hub import local_folder
from megarl.knobs import UserError

MAX_FILE_BYTES = 5 * 2**30
INDEX = "model.safetensors.index.json"
WRITING = ".writing"  # subfolder of unfinished files
WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")
REPLACED = ("*.safetensors", INDEX, "pytorch_model*.bin", "pytorch_model.bin.index.json")  # read by some loader


@dataclass(frozen=True)
class StoredTensor:
    """Location of a tensor: tensor `name` of `file`, or rows from `row` on in its slice `entry`."""

    file: Any
    name: str
    entry: int | None = None  # None: the tensor is not a slice of a fused one
    row: int = 0


class Checkpoint:
    """Reads the safetensors files of a HF checkpoint, box by box."""

    def __init__(self, path: str, config: PretrainedConfig) -> None:
        """Opens the files. `path` is a local folder or a hub name, which is downloaded.

        Raises:
            UserError: see `local_folder`. Also raised if the folder has no or incomplete safetensors files.
        """
        self.folder = local_folder(path)
        files = self._weight_files(path)
        missing = [f for f in files if not (self.folder / f).is_file()]
        if missing or not files:
            problem = f"lacks {missing[0]}" if missing else "holds no *.safetensors"
            raise UserError(f"actor.path={path} {problem}; give a HF checkpoint saved with save_pretrained")
        self._tensors: dict[str, StoredTensor | ExpertSlice | BlockFp8] = {}
        for file in files:
            try:
                opened = safe_open(self.folder / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise UserError(
                    f"actor.path={path}: {file} ({(self.folder / file).stat().st_size} bytes) is cut off or no "
                    f"safetensors file ({error}); copy or download it again"
                ) from error
            stored = {plain_name(name): StoredTensor(opened, name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
            self._tensors.update(stored)
        pair(self._tensors, config_fields(self.folder).get("quantization_config") or {}, f"actor.path={path}")
        self._split_fused_experts(config)
        split(self._tensors, decoder(config))

    def _weight_files(self, path: str) -> list[str]:
        """Names of the weight files: as in the index, or all if there is none."""
        index = self.folder / INDEX
        if not index.is_file():
            return sorted(p.name for p in self.folder.glob("*.safetensors"))
        try:
            return sorted({str(file) for file in json.loads(index.read_text())["weight_map"].values()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"actor.path={path}: {INDEX} is no index of weights ({type(error).__name__}: {error}); copy or "
                "download it again"
            ) from error

    def _split_fused_experts(self, config: PretrainedConfig) -> None:
        """Adds an entry per expert if the checkpoint has all experts of a layer in one tensor.

        `save_pretrained(save_original_format=False)` of transformers writes this format. It has
        `mlp.experts.gate_up_proj [experts, 2 * width, hidden]`, gate rows first, and
        `mlp.experts.down_proj [experts, hidden, width]`.
        """
        model = decoder(config)
        blocks = [(f"model.layers.{i}", layer.mlp) for i, layer in enumerate(model.layers)]
        for prefix, block in [*blocks, *((mtp.prefix, mtp.layer.mlp) for mtp in model.mtp)]:
            if not isinstance(block, Experts):
                continue
            names = block.names
            if names.interleaved:
                continue
            fused, plain = f"{prefix}.mlp", f"{prefix}.{names.block}"
            if (router := self._tensors.pop(f"{fused}.gate.weight", None)) is not None:
                self._tensors[f"{plain}.gate.weight"] = router
            for stored, parts in (("gate_up_proj", (names.gate, names.up)), ("down_proj", (names.down,))):
                tensor = self._tensors.pop(f"{fused}.experts.{stored}", None)
                if tensor is None:
                    continue
                for expert in range(block.count):
                    for i, part in enumerate(parts):
                        self._tensors[f"{plain}.experts.{expert}.{part}.weight"] = StoredTensor(
                            tensor.file, tensor.name, expert, i * block.width
                        )

    def names(self) -> set[str]:
        return set(self._tensors)

    def dtype(self, name: str) -> str:
        """Dtype of a tensor in the words of safetensors, such as F32."""
        stored = self._tensors[name]
        dtype: str = stored.file.get_slice(stored.name).get_dtype()
        return dtype

    def carried(self, config: PretrainedConfig) -> list[str]:
        """Sorted names of the tensors that training carries along: stored, but no part of the actor's model."""
        own = {*tensor_shapes(config), *repeated(config)}
        return sorted(name for name in self._tensors if name.startswith(carried_prefixes(config)) and name not in own)

    def repeated(self, config: PretrainedConfig) -> dict[str, str]:
        """Stored names that repeat another tensor of the model, with that one's (`repeated_tensors.py`)."""
        return {copy: original for copy, original in repeated(config).items() if copy in self._tensors}

    def whole(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yields complete tensors as they are stored, in their own dtypes, and 8-bit ones in bfloat16.

        One is in memory at a time.
        """
        for name in names:
            stored = self._tensors[name]
            if isinstance(stored, BlockFp8):
                shape = stored.file.get_slice(stored.name).get_shape()
                yield name, stored.read(tuple(slice(0, size) for size in shape)).bfloat16()
            else:
                yield name, stored.file.get_tensor(stored.name)

    def read(self, name: str, shape: tuple[int, ...], box: tuple[slice, ...]) -> Tensor:
        """Reads a box of the tensor, which must have `shape`. 8-bit weights come in float32, as exact products.

        Raises:
            UserError: the tensor has another shape, or damaged scales.
        """
        stored = self._tensors[name]
        if isinstance(stored, ExpertSlice):
            return stored.read(shape, box)
        part = stored.file.get_slice(stored.name)
        stored_shape = tuple(part.get_shape())
        entry = stored.entry if isinstance(stored, StoredTensor) else None
        if entry is None and stored_shape != shape:
            raise UserError(f"{self.folder}: {name} has shape {stored_shape}, the config asks for {shape}")
        if isinstance(stored, BlockFp8):
            return stored.read(box)
        if entry is None:
            return part[box]
        rows = slice(stored.row + box[0].start, stored.row + box[0].stop)
        fits = len(stored_shape) == 3 and entry < stored_shape[0]
        if not fits or rows.stop > stored_shape[1] or stored_shape[2] != shape[1]:
            raise UserError(
                f"{self.folder}: {stored.name} has shape {stored_shape}, the config asks for {shape} per expert"
            )
        return part[(slice(entry, entry + 1), rows, *box[1:])][0]


def carried_names(path: str, config: PretrainedConfig) -> list[str]:
    """Lists the tensors of the checkpoint at `path` that training carries along, such as an MTP layer's.

    A scalar model has none. A folder without weights has none either: its model was initialised randomly.
    """
    if not carried_prefixes(config) or is_scalar(config) or not any(local_folder(path).glob("*.safetensors")):
        return []
    return Checkpoint(path, config).carried(config)


def repeated_names(path: str, config: PretrainedConfig) -> dict[str, str]:
    """Lists the tensors of the checkpoint at `path` that repeat another; see `Checkpoint.repeated`."""
    if not repeated(config) or not any(local_folder(path).glob("*.safetensors")):
        return {}
    return Checkpoint(path, config).repeated(config)


def stored_in_float32(path: str, config: PretrainedConfig, names: set[str]) -> set[str]:
    """Selects the tensors that the checkpoint at `path` has in float32. A folder without weights has none."""
    if not names or not any(local_folder(path).glob("*.safetensors")):
        return set()
    checkpoint = Checkpoint(path, config)
    return {name for name in names & checkpoint.names() if checkpoint.dtype(name) == "F32"}


def carried_tensors(path: str, config: PretrainedConfig, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    """Yields tensors of the checkpoint at `path` as they are stored, one in memory at a time.

    Raises:
        UserError: the checkpoint is gone, or lacks one of them.
    """
    if not names:
        return
    checkpoint = Checkpoint(path, config)
    if missing := sorted(set(names) - checkpoint.names()):
        raise UserError(
            f"{path} lacks {missing[0]} ({len(missing)} missing), which training carries along; give the checkpoint "
            "that the run started from"
        )
    yield from checkpoint.whole(names)


def write(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    config: PretrainedConfig,
    source: Path,
    like: Path | None = None,
) -> None:
    """Writes a HF checkpoint to `folder`, with all other files of `source`. Holds at most one file's tensors.

    The config's dtype becomes that of the first tensor. Weights that `folder` held before are replaced, once everything
    is written below it; other files stay. `folder` may be `source`. Tensors get the format of the checkpoint `like`, by
    default `source` (`source_format.py`).
    """
    temporary = folder / WRITING
    shutil.rmtree(temporary, ignore_errors=True)  # of an interrupted write
    temporary.mkdir(parents=True)
    index: dict[str, str] = {}
    pending: dict[str, Tensor] = {}  # tensors of the next file
    files: list[str] = []
    total = 0
    dtype = None

    def flush() -> None:
        if pending:
            files.append(f"part-{len(files):05d}.safetensors")
            saved_file.save(pending, temporary / files[-1])
            index.update(dict.fromkeys(pending, files[-1]))
            pending.clear()

    for name, tensor in restored(fuse(tensors, decoder(config)), config, like or source):
        if sum(t.nbytes for t in pending.values()) + tensor.nbytes > MAX_FILE_BYTES:
            flush()
        pending[name] = tensor
        total += tensor.nbytes
        dtype = dtype or tensor.dtype
    flush()
    _name_files(temporary, files, index, total)
    config = copy.deepcopy(config)
    config.dtype = dtype
    write_small_files(temporary, config, source)
    _publish(temporary, folder)


def _publish(temporary: Path, folder: Path) -> None:
    """Moves written files into `folder`, in place of its old weights.

    Old weights go first and new ones come last, so an interruption leaves no mix that loads.
    """
    for pattern in REPLACED:
        for old in folder.glob(pattern):
            old.unlink()
    written = [path.relative_to(temporary) for path in temporary.rglob("*") if path.is_file()]
    for name in sorted(written, key=lambda name: (name.suffix == ".safetensors", name.name == INDEX, name)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (temporary / name).replace(folder / name)
    shutil.rmtree(temporary)


def write_small_files(folder: Path, config: PretrainedConfig, source: Path) -> None:
    """Copies the files of `source` that hold no weights, and writes a config.json of its own.

    Left out are hidden files, links to folders, and folders with a model of their own: a config.json beside weights.
    """
    write_config(folder, config, source)
    if folder.resolve().is_relative_to(source.resolve() / WRITING):
        return  # the files are there already
    for parent, folders, files in os.walk(source):
        inside = Path(parent).relative_to(source)
        folders[:] = [
            name for name in sorted(folders) if not name.startswith(".") and not _has_model(Path(parent) / name)
        ]
        for name in sorted(files):
            file = Path(parent) / name
            if name.startswith(".") or name.endswith(WEIGHTS) or inside / name == Path("config.json"):
                continue
            if file.is_file():  # neither a pipe nor a broken link
                (folder / inside).mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, folder / inside / name)


def _has_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(name.endswith(WEIGHTS) for name in os.listdir(folder))


def _name_files(folder: Path, files: list[str], index: dict[str, str], total: int) -> None:
    """Renames the written parts by the HF convention. Writes an index if there are several."""
    if len(files) == 1:
        (folder / files[0]).rename(folder / "model.safetensors")
        return
    names = {f: f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i, f in enumerate(files)}
    for old, new in names.items():
        (folder / old).rename(folder / new)
    weight_map = {name: names[file] for name, file in index.items()}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
