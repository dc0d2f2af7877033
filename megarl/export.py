"""Writes a checkpoint's weights as a HF checkpoint: `python -m megarl.export checkpoint=RUN_OR_STEP output=DIR`.

Reads checkpoints of any layout, one tensor at a time, in one process and without building a model.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import json
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors import SafetensorError
from torch import Tensor
from transformers import PretrainedConfig

from megarl.actor.checkpoint.stored_state import DTYPES, FACTS, HF, StoredState
from megarl.actor.weights import hf_files
from megarl.actor.weights.block_fp8 import FP8
from megarl.actor.weights.block_shards import is_buffer
from megarl.actor.weights.peft_files import write as write_peft
from megarl.actor.weights.quantised import rounded
from megarl.actor.weights.repeated_tensors import with_repeated
from megarl.actor.weights.shards import tensor_shapes
from megarl.families import Adapters, load_config, read_config
from megarl.families.adapters import EVERY_LINEAR, LORA_A, LORA_B
from megarl.families.weight_formats import FORMATS, ServedFormat
from megarl.knobs import UserError, knob
from megarl.reshard.plan.sglang_layout import Geometry
from megarl.reshard.quantised_weights import quantised
from megarl.trainer.checkpoints import manifest
from megarl.trainer.checkpoints.manifest import Damaged, Manifest
from megarl.trainer.checkpoints.saver import ACTOR


@dataclass(frozen=True)
class ExportConfig:
    """Source and target of an export."""

    checkpoint: str = knob("", "folder of a run, for its newest whole checkpoint, a step, or a quantised HF model")
    output: str = knob("", "folder to write, new or empty")
    dtype: str = knob("", "float32 or bfloat16; empty: as the weights were trained")
    source: str = knob("", "HF checkpoint of the run's start, if it has moved; its MTP layers are copied from there")
    engine: str = knob(ACTOR, "which engine of the checkpoint: actor, or critic where the run trained one")
    merge: bool = knob(False, "adapters: add them to their base and write a whole model, not PEFT's files")
    quantization: str = knob(
        "", "fp8, fp8_channel or int4: linear layers in 8 or 4 bits, as servers of server.quantization hold them"
    )


USAGE = (
    "usage: python -m megarl.export checkpoint=RUN_OR_STEP_FOLDER output=DIR [dtype=bfloat16] [engine=critic] "
    "[source=DIR] [merge=true] [quantization=fp8]"
)


def parse(arguments: list[str]) -> ExportConfig:
    """Reads the command line's knobs.

    Raises:
        UserError: a knob is unknown, missing or wrong.
    """
    known = [field.name for field in fields(ExportConfig)]
    for key in (argument.partition("=")[0] for argument in arguments):
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise UserError(f"unknown knob {key}; " + (f"did you mean {near[0]}?" if near else USAGE))
    try:
        merged = OmegaConf.merge(OmegaConf.structured(ExportConfig), OmegaConf.from_dotlist(arguments))
        config: ExportConfig = OmegaConf.to_object(merged)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise UserError(f"{str(error).splitlines()[0]}; {USAGE}") from error
    if not config.checkpoint or not config.output:
        raise UserError(f"checkpoint and output must be given; {USAGE}")
    if config.dtype and config.dtype not in DTYPES:
        raise UserError(f"dtype={config.dtype} must be one of {', '.join(DTYPES)}")
    if config.quantization and config.quantization not in FORMATS:
        raise UserError(
            f"quantization={config.quantization} is not known; use {', '.join(FORMATS)}, or leave it out for plain "
            "weights"
        )
    if config.quantization and (config.merge or config.engine != ACTOR):
        raise UserError(
            f"quantization={config.quantization} goes with neither merge=true nor another engine than actor; leave one "
            "out"
        )
    return config


def find(checkpoint: Path, engine: str) -> Manifest:
    """Finds the checkpoint to export, the folder itself or a run's newest whole one, and verifies the engine's files.

    Raises:
        UserError: no such checkpoint is whole, or it lacks the engine.
    """
    if not checkpoint.is_dir():
        raise UserError(
            f"checkpoint={checkpoint} is not a folder; give a run's folder or one of its checkpoints/step_*"
        )
    of_run = (checkpoint / "checkpoints").is_dir()
    folders = manifest.step_folders(checkpoint / "checkpoints") if of_run else [checkpoint]
    for folder in folders:
        try:
            everything = manifest.read(folder)
            files = {name: facts for name, facts in everything.files.items() if name.startswith(f"{engine}/")}
            if f"{engine}/{FACTS}" not in files:
                engines = sorted({name.split("/")[0] for name in everything.files if name.endswith(FACTS)})
                raise UserError(f"{folder} has no engine={engine}; it has {', '.join(engines)}")
            selected = Manifest(folder, everything.step, files)
            selected.check_sizes()
            selected.check_content()
            return selected
        except Damaged as error:
            if not of_run:
                raise UserError(f"checkpoint={folder} is damaged or no checkpoint: {error}; export another") from error
            print(f"checkpoint {folder} is damaged ({error}); looking at the one before", flush=True)
    raise UserError(f"checkpoint={checkpoint} holds no whole checkpoint; give another run")


def export(config: ExportConfig) -> Path:
    """Writes the HF checkpoint under a temporary name, renames it, and returns its folder.

    Raises:
        UserError: see `find`; or `output` is not empty or cannot be written.
    """
    output = Path(config.output).resolve()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"output={output} is there and not empty; give a new folder")
    if _is_quantised(Path(config.checkpoint)):
        if config.quantization:
            raise UserError(f"checkpoint={config.checkpoint} is quantised already; leave out quantization")
        return _rewrite(config, output)
    checkpoint = find(Path(config.checkpoint), config.engine)
    stored = StoredState(checkpoint.folder / config.engine)
    small_files = stored.folder / HF  # config and tokenizer
    hf_config = load_config(small_files)
    format = FORMATS.get(config.quantization)
    if format is not None:
        if "base" in stored.facts:
            raise UserError(
                f"quantization={config.quantization}: checkpoint={config.checkpoint} has adapters alone; leave it out"
            )
        Geometry.of(hf_config, 0, 1, format=format)  # refuses families, and sizes that are no whole blocks
    if "base" in stored.facts:
        return _export_adapters(config, stored, hf_config, output)
    if config.merge:
        raise UserError(f"merge=true: checkpoint={config.checkpoint} has no adapters; leave it out")
    weights = _Conversion(stored, config.dtype, format)
    trained = with_repeated(weights.tensors(checkpoint.step), stored.facts.get("repeated", {}))
    carried = _carried(stored, hf_config, config.source)
    tensors = itertools.chain(trained, carried if format is None else quantised(carried, format))
    start = Path(config.source or stored.facts.get("carried", {}).get("source", ""))
    like = start if (start / "config.json").is_file() else None
    with _renamed(output) as temporary:
        hf_files.write(temporary, tensors, hf_config, small_files, like)
        if format is not None:
            _add_to_config(temporary, dict(format.config))
    weights.rounding.report(stored.facts["dtype"], config.dtype)
    return output


def _export_adapters(config: ExportConfig, stored: StoredState, model: PretrainedConfig, output: Path) -> Path:
    """Writes a checkpoint's adapters in PEFT's format, or a whole model with the adapters merged into their base.

    Raises:
        UserError: the base has moved.
    """
    facts = stored.facts["model"]
    names = [name for name in asdict(Adapters(1, ())) if f"actor.lora.{name}" in facts]
    adapters = Adapters(**{name: facts[f"actor.lora.{name}"] for name in names})
    base, dtype = config.source or stored.facts["base"], DTYPES[config.dtype] if config.dtype else stored.dtype
    rounding = Rounding()
    if not config.merge:
        tensors = {name: rounding.convert(tensor, dtype) for name, tensor in stored.tensors()}
        with _renamed(output) as temporary:
            write_peft(temporary, tensors, adapters, 0.0, base)
        rounding.report(stored.facts["dtype"], config.dtype)
        return output
    if not Path(base).is_dir():
        raise UserError(f"{base}, the base of these adapters, is gone; give it as source=DIR")
    checkpoint, trained = hf_files.Checkpoint(base, model), dict(stored.tensors())

    def merged() -> Iterator[tuple[str, Tensor]]:
        for name, shape in tensor_shapes(model).items():
            if name in trained:  # a value head
                yield name, rounding.convert(trained[name], dtype)
                continue
            weight, stem = checkpoint.read(name, shape, tuple(slice(0, n) for n in shape)), name.removesuffix(".weight")
            if not is_buffer(name):
                weight = weight.to(stored.dtype)
            if adapters.quantization != "none" and EVERY_LINEAR.adapt(name, shape):
                weight = rounded(weight, adapters.quantization)
            if stem + LORA_A in trained:
                weight = adapters.merge(weight, trained[stem + LORA_A], trained[stem + LORA_B])
            yield name, weight if is_buffer(name) else rounding.convert(weight, dtype)

    carried = checkpoint.whole(checkpoint.carried(model))
    _write(output, itertools.chain(merged(), carried), model, stored.folder / HF, Path(base))
    rounding.report(stored.facts["dtype"], config.dtype)
    return output


@contextlib.contextmanager
def _renamed(output: Path) -> Iterator[Path]:
    """Gives a temporary folder, and renames it to `output` at the end.

    Raises:
        UserError: `output` cannot be written.
    """
    temporary = output.with_name(output.name + manifest.WRITING)
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # from an interrupted export
        yield temporary
        temporary.replace(output)
    except (OSError, SafetensorError) as error:  # a full disk is the latter, where safetensors writes
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"output={output} cannot be written ({error}); give another folder") from error


def _carried(stored: StoredState, config: PretrainedConfig, source: str) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that are not trained, from the run's source: no checkpoint of a run holds them.

    Raises:
        UserError: the source has moved.
    """
    facts = stored.facts.get("carried", {"source": "", "tensors": []})
    folder = source or facts["source"]
    if facts["tensors"] and not Path(folder).is_dir():
        raise UserError(
            f"{folder} is gone, and holds {facts['tensors'][0]} and {len(facts['tensors']) - 1} more tensors that "
            "training carries along; give the run's source checkpoint as source=DIR"
        )
    return hf_files.carried_tensors(folder, config, facts["tensors"])


def _write(
    output: Path,
    tensors: Iterable[tuple[str, Tensor]],
    config: PretrainedConfig,
    source: Path,
    like: Path | None = None,
) -> None:
    """Writes a HF checkpoint under a temporary name and renames it; see `hf_files.write`.

    Raises:
        UserError: `output` cannot be written.
    """
    with _renamed(output) as temporary:
        hf_files.write(temporary, tensors, config, source, like)


def _add_to_config(folder: Path, entry: dict[str, Any]) -> None:
    """Writes the entry `quantization_config` into the folder's config.json."""
    file = folder / "config.json"
    fields = json.loads(file.read_text()) | {"quantization_config": entry}
    file.write_text(json.dumps(fields, indent=2) + "\n")


def _is_quantised(folder: Path) -> bool:
    """True if the folder holds a HF model with quantised weights."""
    file = folder / "config.json"
    return file.is_file() and "quantization_config" in json.loads(file.read_text())


def _rewrite(config: ExportConfig, output: Path) -> Path:
    """Writes a HF checkpoint with quantised weights again, in 16 or 32 bits: gpt-oss's MXFP4, DeepSeek's FP8."""
    model = read_config(config.checkpoint)
    stored, shapes = hf_files.Checkpoint(config.checkpoint, model), tensor_shapes(model)
    if missing := sorted(set(shapes) - stored.names()):
        raise UserError(f"checkpoint={config.checkpoint} lacks the tensor {missing[0]}; is it complete?")

    rounding = Rounding()

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, shape in shapes.items():
            tensor = stored.read(name, shape, tuple(slice(0, size) for size in shape))
            if config.dtype and not is_buffer(name):
                tensor = rounding.convert(tensor, DTYPES[config.dtype])
            elif stored.dtype(name) == FP8:
                tensor = rounding.convert(tensor, torch.bfloat16)
            yield name, tensor

    _write(output, itertools.chain(tensors(), stored.whole(stored.carried(model))), model, Path(config.checkpoint))
    rounding.report("the stored values", config.dtype or "bfloat16")
    return output


class Rounding:
    """Counts the weights that an export rounds."""

    def __init__(self) -> None:
        self.rounded = self.total = 0

    def convert(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the tensor in `dtype`."""
        converted = tensor.to(dtype)
        self.rounded += int((converted != tensor).sum())
        self.total += tensor.numel()
        return converted

    def report(self, stored: str, written: str) -> None:
        """Prints a line if weights were rounded."""
        if self.rounded:
            print(f"rounded {self.rounded:,} of {self.total:,} weights from {stored} to {written}")


class _Conversion:
    """Converts a checkpoint's weights to `dtype` ("": as they are).

    Linear layers become `format` instead, if there is one, from the dtype in which they were trained.
    """

    def __init__(self, stored: StoredState, dtype: str, format: ServedFormat | None = None) -> None:
        self.stored = stored
        self.format = format
        self.dtype = DTYPES[dtype] if dtype else stored.dtype
        self.in_float32 = set() if dtype else set(stored.facts.get("float32", ()))
        self.rounding = Rounding()

    def tensors(self, step: int) -> Iterator[tuple[str, Tensor]]:
        """Yields the converted weights, and shows a progress bar."""
        columns = (
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        )  # fmt: skip
        with Progress(*columns) as progress:
            task = progress.add_task(f"export of step {step}", total=self.stored.weight_bytes)
            for name, tensor in self.stored.tensors():
                if self.format is not None and self.format.quantises(name):
                    yield from quantised([(name, tensor)], self.format)
                    progress.advance(task, tensor.nbytes)
                    continue
                keeps = is_buffer(name) or name in self.in_float32
                yield name, self.rounding.convert(tensor, torch.float32 if keeps else self.dtype)
                progress.advance(task, tensor.nbytes)


def main(arguments: list[str]) -> int:
    """Runs the command. A UserError prints one line and returns 2."""
    if not arguments or any(a in ("-h", "--help") for a in arguments):
        print(USAGE)
        return 0
    try:
        folder = export(parse(arguments))
    except UserError as error:
        print(f"megarl: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("megarl: interrupted", file=sys.stderr)
        return 130
    print(f"HF checkpoint in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
