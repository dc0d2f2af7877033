"""Saves and loads the training state of an engine, bit for bit, from any layout to any other.

The distributed optimizer assigns each rank a flat range of every parameter on its stage. `hf_weights.shards` lists the
boxes of HF tensors in the parameter. The range cuts a run out of each box, and the rank writes its runs
(`stored_state.py` has the format). Nothing is gathered and nothing is written twice. A reader of any layout finds the
boxes that it needs.

Megatron's `dist_checkpointing` is not used. Its files are pickles, it gathers the full optimizer state over dp at every
save, and its writers are forked processes.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig

from megarl.actor.checkpoint.stored_state import (
    BUFFER,
    FACTS,
    FORMAT,
    HF,
    INDEX,
    Place,
    StoredState,
    key_of,
    rank_file,
    shape_of,
)
from megarl.actor.weights import hf_files, hf_weights
from megarl.actor.weights.block_shards import is_buffer
from megarl.actor.weights.hf_weights import Shard
from megarl.actor.weights.shards import float32_tensors
from megarl.families import adapters_of
from megarl.hub import local_folder
from megarl.knobs import UserError
from megarl.parallel import megatron_patches
from megarl.parallel.broadcast import gather_json
from megarl.parallel.groups import Groups

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class OwnedRange:
    """Flat range `[start, stop)` of a native parameter. This rank owns its main parameter and moments."""

    param: torch.nn.Parameter
    start: int
    stop: int
    optimizer: Any  # Megatron's DistributedOptimizer
    replica: int  # lowest rank of the data-parallel group that shards the parameter

    @property
    def main(self) -> Tensor:
        """Main parameter, float32 `[stop - start]`; a view if the parameter itself is float32."""
        main: Tensor = self.optimizer._get_main_param_and_optimizer_states(self.param)["param"]
        return main

    @property
    def inner(self) -> Any:
        """Torch optimizer inside Megatron's."""
        return self.optimizer.optimizer


@dataclass(frozen=True)
class OwnedRun:
    """Run `[first, last)` of a box: the box's elements inside the rank's range of the parameter."""

    shard: Shard
    owned: OwnedRange
    offset: int  # of the box's first element within the parameter
    first: int
    last: int

    @property
    def box(self) -> tuple[str, Place, Place]:
        """Tensor name, start and stop of the box."""
        return self.shard.name, self.shard.start, self.shard.stop

    def view_in(self, flat: Tensor) -> Tensor:
        """View of the box in a flat tensor with the parameter's layout."""
        return flat.as_strided(self.shard.view.shape, self.shard.view.stride(), self.offset)


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of a checkpoint, copied to the host. A thread can write it while training continues."""

    rank: int
    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    index: dict[str, Any]
    config: PretrainedConfig
    source: Path

    def write(self, folder: Path) -> list[Path]:
        """Writes this rank's files to `folder` and returns their paths. Not a collective."""
        folder.mkdir(parents=True, exist_ok=True)
        written = [folder / rank_file(self.rank)]
        save_file(self.tensors, written[0])
        written[0].chmod(0o644)  # save_file makes it readable by its owner only
        if self.rank == 0:
            for name, document in ((FACTS, self.facts), (INDEX, self.index)):
                (folder / name).write_text(json.dumps(document, indent=1 if name == FACTS else None))
                written.append(folder / name)
            (folder / HF).mkdir(exist_ok=True)
            hf_files.write_small_files(folder / HF, self.config, self.source)
            written += sorted(path for path in (folder / HF).rglob("*") if path.is_file())
        return written


class EngineState:
    """Snapshots the state of one engine, or loads it from a folder. All ranks create it together."""

    def __init__(
        self,
        modules: Sequence[GPTModel],
        config: PretrainedConfig,
        optimizer: Any,
        scheduler: OptimizerParamScheduler,
        groups: Groups,
        source: str,
    ) -> None:
        """Stores the engine's parts. `source` is the HF checkpoint whose tokenizer is saved with the state."""
        self.modules, self.config, self.groups, self.source = modules, config, groups, local_folder(source)
        self.optimizer, self.scheduler = optimizer, scheduler
        self.dtype: torch.dtype = modules[0].config.params_dtype
        dtypes = {param.dtype for param in hf_weights.parameters(modules) if param.requires_grad}
        assert dtypes <= {self.dtype, torch.float32}, "a model has one dtype, and parameters in float32"

    # -- owned runs ------------------------------------------------------------------------------------------

    def _parts(self) -> list[Any]:
        """Lists Megatron's distributed optimizers: one for dense parameters, one for experts."""
        chained = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return [part for part in chained if not part.is_stub_optimizer]

    def _owned(self) -> Iterator[OwnedRange]:
        """Yields the parameter ranges that this rank owns."""
        for part in self._parts():
            replica = min(dist.get_process_group_ranks(part.data_parallel_group))
            for param in part.model_param_gbuf_map:
                owned = part._get_model_param_range_map(param)["param"]
                yield OwnedRange(param, owned.start, owned.end, part, replica)

    def _runs(self) -> Iterator[OwnedRun]:
        """Yields every run on this rank, by parameter. Includes runs that another rank writes."""
        ranges = {id(owned.param): owned for owned in self._owned()}
        params = sorted(hf_weights.parameters(self.modules), key=lambda p: p.data_ptr())
        starts = torch.tensor([p.data_ptr() for p in params])
        for shard in hf_weights.shards(self.modules, self.config, self.groups):
            if shard.view.numel() == 0 or is_buffer(shard.name):
                continue
            param = params[int(torch.searchsorted(starts, shard.view.data_ptr(), right=True)) - 1]
            owned = ranges.get(id(param))
            if owned is None:
                continue  # other ranks own all of it
            offset = (shard.view.data_ptr() - param.data_ptr()) // param.element_size()
            first, last = (elements_before(shard.view, bound - offset) for bound in (owned.start, owned.stop))
            yield OwnedRun(shard, owned, offset, first, last)

    @functools.cached_property
    def _shares(self) -> tuple[dict[str, Any], set[tuple[str, Place, Place]]]:
        """Builds the index of a checkpoint, and the set of boxes whose runs this rank writes. A collective.

        Several data-parallel groups can hold the same box, such as norms under tp and tied embeddings. Then only the
        group with the lowest `replica` writes it.
        """
        facts = [
            [
                run.shard.name,
                list(run.shard.shape),
                list(run.shard.start),
                list(run.shard.stop),
                run.first,
                run.last,
                run.owned.replica,
            ]
            for run in self._runs()
            if run.last > run.first
        ]
        index: dict[str, Any] = {}
        writers: dict[tuple[str, Place, Place], int] = {}
        facts_by_rank = gather_json(facts)
        for fact in (fact for rank_facts in facts_by_rank for fact in rank_facts):
            box = fact[0], tuple(fact[2]), tuple(fact[3])
            writers[box] = min(writers.get(box, fact[6]), fact[6])
        boxes: dict[tuple[str, Place, Place], dict[str, Any]] = {}
        for rank, rank_facts in enumerate(facts_by_rank):
            for name, shape, start, stop, first, last, replica in rank_facts:
                box = name, tuple(start), tuple(stop)
                if replica == writers[box]:
                    if box not in boxes:
                        boxes[box] = {"start": start, "stop": stop, "runs": []}
                        index.setdefault(name, {"shape": shape, "boxes": []})["boxes"].append(boxes[box])
                    boxes[box]["runs"].append([first, last, rank])
        for entry in boxes.values():
            entry["runs"].sort()
        index.update(self._buffer_index(gather_json({s.name: list(s.shape) for s in self._buffers()})))
        own_replicas = {owned.replica for owned in self._owned()}
        return index, {box for box, replica in writers.items() if replica in own_replicas}

    def _buffers(self) -> list[Shard]:
        """Lists the HF tensors in buffers on this rank. Every rank of a stage holds all of each."""
        return [s for s in hf_weights.shards(self.modules, self.config, self.groups) if is_buffer(s.name)]

    def _buffer_index(self, shapes_by_rank: list[Any]) -> dict[str, Any]:
        """Builds the index of tensors in buffers: the lowest rank that holds one writes it as a single run."""
        index: dict[str, Any] = {}
        for rank, shapes in enumerate(shapes_by_rank):
            for name, shape in shapes.items():
                box = {"start": [0] * len(shape), "stop": shape, "runs": [[0, math.prod(shape), rank]]}
                index.setdefault(name, {"shape": shape, "kind": BUFFER, "boxes": [box]})
        return index

    # -- saving ----------------------------------------------------------------------------------------------

    @functools.cached_property
    def _carried(self) -> list[str]:
        """Names of the source's tensors that training carries along. A checkpoint names them and holds no copy."""
        if self.groups.rank != 0 or adapters_of(self.config) is not None:
            return []
        return hf_files.carried_names(str(self.source), self.config)

    @functools.cached_property
    def _repeated(self) -> dict[str, str]:
        """Names of the source's tensors that repeat another one of the model."""
        if self.groups.rank != 0 or adapters_of(self.config) is not None:
            return {}
        return hf_files.repeated_names(str(self.source), self.config)

    @functools.cached_property
    def _in_float32(self) -> list[str]:
        """Names of tensors that an export of a bfloat16 model writes in float32, as the source has them."""
        if self.groups.rank != 0 or self.dtype == torch.float32 or adapters_of(self.config) is not None:
            return []
        return sorted(hf_files.stored_in_float32(str(self.source), self.config, float32_tensors(self.config)))

    def snapshot(self) -> Snapshot:
        """Copies this rank's runs to the host. A collective."""
        index, written_boxes = self._shares
        steps = max(int(n) for n in gather_json(self._steps_taken()))
        tensors: dict[str, Tensor] = {}
        flat: dict[str, Tensor] = {}
        previous: OwnedRange | None = None
        for run in self._runs():
            if run.owned is not previous:
                previous, flat = run.owned, self._flat(run.owned, steps > 0)
            if run.box in written_boxes and run.last > run.first:
                for kind, values in flat.items():
                    elements = run.view_in(values).reshape(-1)[run.first : run.last]
                    tensors[key_of(kind, run.shard.name, run.shard.start)] = elements.clone()
        for shard in self._buffers():
            if index[shard.name]["boxes"][0]["runs"][0][2] == self.groups.rank:
                tensors[key_of(BUFFER, shard.name, shard.start)] = shard.view.detach().flatten().cpu().clone()
        facts = {
            "format": FORMAT,
            "model": shape_of(self.config),
            "dtype": str(self.dtype).removeprefix("torch."),
            "layout": self.groups.layout.sizes(),
            "adam_steps": steps,
            "scheduler_steps": self.scheduler.num_steps,
        }
        if self._in_float32:
            facts["float32"] = self._in_float32
        if adapters_of(self.config) is not None:
            facts["base"] = str(self.source.resolve())
        if self._repeated:
            facts["repeated"] = self._repeated
        if self._carried:
            facts["carried"] = {"source": str(self.source.resolve()), "tensors": self._carried}
        return Snapshot(self.groups.rank, tensors, facts, index, self.config, self.source)

    def _flat(self, owned: OwnedRange, with_moments: bool) -> dict[str, Tensor]:
        """Copies each kind to the host, in a flat tensor of the parameter's size. Only the owned range is filled."""
        values = {"weight": owned.param.detach().view(-1)[owned.start : owned.stop]}
        if owned.param.dtype != torch.float32:
            values["main"] = owned.main
        if with_moments:
            values.update({k: _moments(owned)[k] for k in MOMENTS})
        flat = {}
        for kind, owned_values in values.items():
            flat[kind] = torch.empty(owned.param.numel(), dtype=owned_values.dtype)
            flat[kind][owned.start : owned.stop] = owned_values.detach()
        return flat

    def _steps_taken(self) -> int:
        """Adam's step count; 0 on a rank without owned ranges."""
        for owned in self._owned():
            for group in owned.inner.param_groups:
                step = group.get("step", owned.inner.state.get(owned.main, {}).get("step"))  # FusedAdam counts by group
                if step is not None:
                    return int(step)
        return 0

    # -- loading ---------------------------------------------------------------------------------------------

    def load(self, folder: Path) -> int:
        """Fills parameters, optimizer and schedule from a state that any layout wrote. Returns Adam's steps.

        Raises:
            UserError: the state has another model, or is incomplete.
        """
        stored = StoredState(folder)
        self._check(stored)
        with torch.no_grad():
            for param in hf_weights.parameters(self.modules):
                if param.requires_grad:
                    param.zero_()  # padding of the vocabulary stays zero
            for shard in hf_weights.shards(self.modules, self.config, self.groups):
                if shard.view.numel():
                    weights = stored.read(stored.kinds[shard.name], shard.name, shard.start, shard.stop)
                    shard.view.copy_(weights.view(shard.view.shape))
            steps: int = stored.facts["adam_steps"]
            moments = MOMENTS if steps else ()
            runs: dict[int, list[OwnedRun]] = {}  # by parameter
            for run in self._runs():
                runs.setdefault(id(run.owned.param), []).append(run)
            for owned in self._owned():
                kinds = [*([] if owned.param.dtype == torch.float32 else ["main"]), *moments]
                self._fill(stored, owned, runs.get(id(owned.param), []), kinds, steps)
        for part in self._parts():
            if isinstance(part.optimizer, HybridDeviceOptimizer):  # it steps copies on the host: copy them again
                part.optimizer._init_sub_optimizers()
                part.optimizer._sync_hdo_param_groups_to_sub_optimizers()
                part.optimizer.param_update_in_fp32 = False  # else it looks for main parameters beside these
                part.optimizer._sync_hdo_state_to_sub_optimizers()
        self.scheduler.num_steps = 0
        self.scheduler.step(stored.facts["scheduler_steps"])  # only the count: this run may be longer
        return steps

    @torch.no_grad()
    def follow_parameters(self) -> None:
        """Copies parameters that were loaded without a state to the main parameters, and to the host's where it steps.

        Megatron does the former, but for Adam on the host (`actor.offload_optimizer`), whose main parameters it skips.
        """
        with megatron_patches.scope():
            self.optimizer.reload_model_params()
        for owned in self._owned():
            if isinstance(owned.inner, HybridDeviceOptimizer):
                owned.main.copy_(owned.param.view(-1)[owned.start : owned.stop])
                owned.inner.gpu_params_map_cpu_copy[owned.main].copy_(owned.main)

    def _check(self, stored: StoredState) -> None:
        local_shapes = {s.name: tuple(s.shape) for s in hf_weights.shards(self.modules, self.config, self.groups)}
        names: set[str] = set()  # of all ranks
        for rank_names in gather_json(list(local_shapes)):
            names.update(rank_names)
        differing = sorted(names ^ set(stored.shapes))
        if differing:
            raise UserError(
                f"{stored.folder} and this model differ in the tensor {differing[0]} ({len(differing)} in total); "
                "resume with the model that the run started with"
            )
        for name, shape in local_shapes.items():
            if stored.shapes[name] != shape:
                raise UserError(
                    f"{stored.folder}: {name} has shape {stored.shapes[name]}, this model's has {shape}; resume with "
                    "the model that the run started with"
                )
        if stored.dtype != self.dtype:
            raise UserError(f"{stored.folder} has dtype {stored.dtype}, this engine {self.dtype}; use the same dtype")

    def _fill(self, stored: StoredState, owned: OwnedRange, runs: list[OwnedRun], kinds: list[str], steps: int) -> None:
        """Sets the main parameter and the moments of one range, from its runs."""
        if not steps:
            owned.inner.state.pop(owned.main, None)
            for group in owned.inner.param_groups:
                group.pop("step", None)  # FusedAdam's
        for kind in kinds:
            flat = torch.zeros(owned.param.numel())
            for run in runs:
                shard, bounds = run.shard, (run.first, run.last)
                box = torch.zeros(math.prod(shard.view.shape))
                box[run.first : run.last] = stored.read(kind, shard.name, shard.start, shard.stop, bounds)
                run.view_in(flat).copy_(box.view(shard.view.shape))
            target = owned.main if kind == "main" else _moments(owned, steps)[kind]
            target.copy_(flat[owned.start : owned.stop])


def _moments(owned: OwnedRange, steps: int | None = None) -> dict[str, Tensor]:
    """Returns Adam's state of a range. With `steps`, creates missing moments and sets the step count.

    Adam itself creates its state only at its first step.
    """
    state = owned.inner.state[owned.main]
    if steps is not None:
        for kind in MOMENTS:
            if kind not in state:
                state[kind] = torch.zeros_like(owned.main)
        if isinstance(owned.inner, torch.optim.Adam | torch.optim.AdamW | HybridDeviceOptimizer):
            state["step"] = torch.tensor(float(steps))
        else:  # Transformer Engine's and Apex's FusedAdam count by group
            for group in owned.inner.param_groups:
                group["step"] = steps
    return state


def elements_before(view: Tensor, limit: int) -> int:
    """Counts the elements of a strided view with an offset below `limit` from its first element.

    Strides must decrease from dimension to dimension. Then these elements come first in row-major order.
    """
    dims = [(n, s) for n, s in zip(view.shape, view.stride(), strict=True) if n > 1]
    for (_, outer), (n, inner) in itertools.pairwise(dims):
        assert outer >= n * inner, f"strides {view.stride()} of a view {tuple(view.shape)} do not decrease"
    count, remaining = 0, limit
    for d, (n, stride) in enumerate(dims):
        if remaining <= 0:
            return count
        full_entries = min(n, remaining // stride)
        count += full_entries * math.prod(size for size, _ in dims[d + 1 :])
        if full_entries == n:
            return count
        remaining -= full_entries * stride
    return count + (1 if remaining > 0 else 0)
