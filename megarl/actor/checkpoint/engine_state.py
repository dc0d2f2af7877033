"""Training state of an engine, bit for bit, out of any layout and into any other.

Each rank owns, of every parameter on its stage, the flat range that the distributed optimizer gave it. `hf.shards`
says which boxes of HF tensors the parameter holds, and a range cuts a run out of each box: that is what the rank writes
(`stored.py` has the format). Nothing is gathered, nothing is written twice, and a reader finds whatever its own layout
needs. Megatron's `dist_checkpointing` is not used: its files are pickles, it gathers the whole optimizer state over dp
at every save, and its writers are forked processes.
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
from megarl.actor.weights.hf_weights import Shard
from megarl.hub import local_folder
from megarl.knobs import UserError
from megarl.parallel.broadcast import gather_json
from megarl.parallel.groups import Groups

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class OwnedRange:
    """The flat range `[start, stop)` of a native parameter whose main parameter and moments this rank keeps."""

    param: torch.nn.Parameter
    start: int
    stop: int
    optimizer: Any  # Megatron's DistributedOptimizer
    replica: int  # the lowest rank of those that share the parameter out among them

    @property
    def main(self) -> Tensor:
        """float32 `[stop - start]`; of a float32 parameter a view of it."""
        main: Tensor = self.optimizer._get_main_param_and_optimizer_states(self.param)["param"]
        return main

    @property
    def inner(self) -> Any:
        """The torch optimizer below Megatron's."""
        return self.optimizer.optimizer


@dataclass(frozen=True)
class OwnedRun:
    """The run `[first, last)` of a box that a rank's range of a parameter cuts out."""

    shard: Shard
    owned: OwnedRange
    offset: int  # of the box's first element within the parameter
    first: int
    last: int

    @property
    def box(self) -> tuple[str, Place, Place]:
        return self.shard.name, self.shard.start, self.shard.stop

    def of(self, flat: Tensor) -> Tensor:
        """The box, strided, within a flat tensor laid out as the parameter."""
        return flat.as_strided(self.shard.view.shape, self.shard.view.stride(), self.offset)


@dataclass(frozen=True)
class Snapshot:
    """What a rank adds to a checkpoint, copied to the host: training may go on while a thread writes it."""

    rank: int
    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    index: dict[str, Any]
    config: PretrainedConfig
    source: Path

    def write(self, folder: Path) -> list[Path]:
        """Writes this rank's files to `folder` and returns them; no collective."""
        folder.mkdir(parents=True, exist_ok=True)
        written = [folder / rank_file(self.rank)]
        save_file(self.tensors, written[0])
        written[0].chmod(0o644)  # written for its owner alone
        if self.rank == 0:
            for name, document in ((FACTS, self.facts), (INDEX, self.index)):
                (folder / name).write_text(json.dumps(document, indent=1 if name == FACTS else None))
                written.append(folder / name)
            (folder / HF).mkdir(exist_ok=True)
            hf_files.write_small_files(folder / HF, self.config, self.source)
            written += sorted((folder / HF).iterdir())
        return written


class EngineState:
    """The state of one engine: taken as a snapshot, or read from a folder. Made by all ranks together."""

    def __init__(
        self,
        modules: Sequence[GPTModel],
        config: PretrainedConfig,
        optimizer: Any,
        scheduler: OptimizerParamScheduler,
        groups: Groups,
        source: str,
    ) -> None:
        """`source` is the HF checkpoint whose tokenizer goes with the state."""
        self.modules, self.config, self.groups, self.source = modules, config, groups, local_folder(source)
        self.optimizer, self.scheduler = optimizer, scheduler
        self.dtype: torch.dtype = modules[0].config.params_dtype
        assert {param.dtype for param in hf_weights.parameters(modules)} == {self.dtype}, "a model has one dtype"

    # -- what lies where -----------------------------------------------------------------------------------------

    def _parts(self) -> list[Any]:
        """Megatron's distributed optimizers: one of the dense parameters, one of the experts."""
        chained = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return [part for part in chained if not part.is_stub_optimizer]

    def _owned(self) -> Iterator[OwnedRange]:
        for part in self._parts():
            replica = min(dist.get_process_group_ranks(part.data_parallel_group))
            for param in part.model_param_gbuf_map:
                owned = part._get_model_param_range_map(param)["param"]
                yield OwnedRange(param, owned.start, owned.end, part, replica)

    def _fragments(self) -> Iterator[OwnedRun]:
        """Every run that this rank holds, those included that another rank writes; by parameter."""
        places = {id(o.param): o for o in self._owned()}
        params = sorted(hf_weights.parameters(self.modules), key=lambda p: p.data_ptr())
        starts = torch.tensor([p.data_ptr() for p in params])
        for shard in hf_weights.shards(self.modules, self.config, self.groups):
            if shard.view.numel() == 0:
                continue
            param = params[int(torch.searchsorted(starts, shard.view.data_ptr(), right=True)) - 1]
            owned = places.get(id(param))
            if owned is None:
                continue  # all of it belongs to other ranks
            offset = (shard.view.data_ptr() - param.data_ptr()) // param.element_size()
            first, last = (elements_before(shard.view, bound - offset) for bound in (owned.start, owned.stop))
            yield OwnedRun(shard, owned, offset, first, last)

    @functools.cached_property
    def _shares(self) -> tuple[dict[str, Any], set[tuple[str, Place, Place]]]:
        """The index of a checkpoint, and which boxes this rank writes its runs of; a collective.

        Where several groups of replicas hold a box (norms under tp, tied embeddings), the lowest writes it.
        """
        facts = [
            [
                f.shard.name,
                list(f.shard.shape),
                list(f.shard.start),
                list(f.shard.stop),
                f.first,
                f.last,
                f.owned.replica,
            ]
            for f in self._fragments()
            if f.last > f.first
        ]
        index: dict[str, Any] = {}
        writers: dict[tuple[str, Place, Place], int] = {}
        everyone = gather_json(facts)
        for fact in (fact for theirs in everyone for fact in theirs):
            box = fact[0], tuple(fact[2]), tuple(fact[3])
            writers[box] = min(writers.get(box, fact[6]), fact[6])
        boxes: dict[tuple[str, Place, Place], dict[str, Any]] = {}
        for rank, theirs in enumerate(everyone):
            for name, shape, start, stop, first, last, replica in theirs:
                box = name, tuple(start), tuple(stop)
                if replica == writers[box]:
                    if box not in boxes:
                        boxes[box] = {"start": start, "stop": stop, "runs": []}
                        index.setdefault(name, {"shape": shape, "boxes": []})["boxes"].append(boxes[box])
                    boxes[box]["runs"].append([first, last, rank])
        for entry in boxes.values():
            entry["runs"].sort()
        own = {o.replica for o in self._owned()}
        return index, {box for box, replica in writers.items() if replica in own}

    # -- out -----------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Copies this rank's runs to the host; a collective."""
        index, mine = self._shares
        steps = max(int(n) for n in gather_json(self._steps_taken()))
        tensors: dict[str, Tensor] = {}
        flat: dict[str, Tensor] = {}
        last: OwnedRange | None = None
        for fragment in self._fragments():
            if fragment.owned is not last:
                last, flat = fragment.owned, self._flat(fragment.owned, steps > 0)
            if fragment.box in mine and fragment.last > fragment.first:
                for kind, values in flat.items():
                    run = fragment.of(values).reshape(-1)[fragment.first : fragment.last]
                    tensors[key_of(kind, fragment.shard.name, fragment.shard.start)] = run.clone()
        facts = {
            "format": FORMAT,
            "model": shape_of(self.config),
            "dtype": str(self.dtype).removeprefix("torch."),
            "layout": self.groups.layout.sizes(),
            "adam_steps": steps,
            "scheduler_steps": self.scheduler.num_steps,
        }
        return Snapshot(self.groups.rank, tensors, facts, index, self.config, self.source)

    def _flat(self, owned: OwnedRange, with_moments: bool) -> dict[str, Tensor]:
        """By kind: a tensor on the host laid out as the whole parameter, its own range filled in."""
        values = {"weight": owned.param.detach().view(-1)[owned.start : owned.stop]}
        if self.dtype != torch.float32:
            values["main"] = owned.main
        if with_moments:
            values.update({k: _moments(owned)[k] for k in MOMENTS})
        flat = {}
        for kind, own in values.items():
            flat[kind] = torch.empty(owned.param.numel(), dtype=own.dtype)
            flat[kind][owned.start : owned.stop] = own.detach()
        return flat

    def _steps_taken(self) -> int:
        """Of Adam; 0 on a rank that owns nothing."""
        for owned in self._owned():
            for group in owned.inner.param_groups:
                step = group.get("step", owned.inner.state.get(owned.main, {}).get("step"))  # fused ones count by group
                if step is not None:
                    return int(step)
        return 0

    # -- in ------------------------------------------------------------------------------------------------------

    def load(self, folder: Path) -> None:
        """Fills parameters, optimizer and schedule from a state that any layout wrote.

        Raises:
            UserError: the state is of another model, or not whole.
        """
        stored = StoredState(folder)
        self._check(stored)
        with torch.no_grad():
            for param in hf_weights.parameters(self.modules):
                param.zero_()  # padding of the vocabulary stays so
            for shard in hf_weights.shards(self.modules, self.config, self.groups):
                if shard.view.numel():
                    weights = stored.read("weight", shard.name, shard.start, shard.stop)
                    shard.view.copy_(weights.view(shard.view.shape))
            kinds = [] if self.dtype == torch.float32 else ["main"]
            steps = stored.facts["adam_steps"]
            kinds += MOMENTS if steps else []
            by_owned: dict[int, list[OwnedRun]] = {}
            for fragment in self._fragments():
                by_owned.setdefault(id(fragment.owned.param), []).append(fragment)
            for owned in self._owned():
                self._fill(stored, owned, by_owned.get(id(owned.param), []), kinds, steps)
        for part in self._parts():
            if isinstance(part.optimizer, HybridDeviceOptimizer):  # it steps copies on the host: they are made again
                part.optimizer._init_sub_optimizers()
                part.optimizer._sync_hdo_param_groups_to_sub_optimizers()
                part.optimizer._sync_hdo_state_to_sub_optimizers()
        self.scheduler.num_steps = 0
        self.scheduler.step(stored.facts["scheduler_steps"])  # the schedule itself is the run's own: it may be longer

    def _check(self, stored: StoredState) -> None:
        mine = {s.name: tuple(s.shape) for s in hf_weights.shards(self.modules, self.config, self.groups)}
        everyone: dict[str, Any] = {}
        for theirs in gather_json({name: list(shape) for name, shape in mine.items()}):
            everyone.update(theirs)
        differing = sorted(set(everyone) ^ set(stored.shapes))
        if differing:
            raise UserError(
                f"{stored.folder} and this model differ in the tensor {differing[0]} ({len(differing)} such); resume "
                "with the model that the run began with"
            )
        for name, shape in mine.items():
            if stored.shapes[name] != shape:
                raise UserError(
                    f"{stored.folder}: {name} has shape {stored.shapes[name]}, this model's has {shape}; resume with "
                    "the model that the run began with"
                )
        if stored.dtype != self.dtype:
            raise UserError(f"{stored.folder} has dtype {stored.dtype}, this engine {self.dtype}; use the same dtype")

    def _fill(
        self, stored: StoredState, owned: OwnedRange, fragments: list[OwnedRun], kinds: list[str], steps: int
    ) -> None:
        """Sets the main parameter and the moments of one range."""
        if not steps:
            owned.inner.state.pop(owned.main, None)
        for kind in kinds:
            flat = torch.zeros(owned.param.numel())
            for f in fragments:
                box = torch.zeros(math.prod(f.shard.view.shape))
                box[f.first : f.last] = stored.read(kind, f.shard.name, f.shard.start, f.shard.stop, (f.first, f.last))
                f.of(flat).copy_(box.view(f.shard.view.shape))
            target = owned.main if kind == "main" else _moments(owned, steps)[kind]
            target.copy_(flat[owned.start : owned.stop])


def _moments(owned: OwnedRange, steps: int | None = None) -> dict[str, Tensor]:
    """Adam's state of a range. With `steps` it is made, which Adam does at its first step, and the count is set."""
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
    """How many elements of a strided view lie less than `limit` elements behind its first one.

    They are the first so many in row-major order, as strides fall from dimension to dimension.
    """
    dims = [(n, s) for n, s in zip(view.shape, view.stride(), strict=True) if n > 1]
    for (_, outer), (n, inner) in itertools.pairwise(dims):
        assert outer >= n * inner, f"strides {view.stride()} of a view {tuple(view.shape)} do not fall"
    count, rest = 0, limit
    for d, (n, stride) in enumerate(dims):
        if rest <= 0:
            return count
        whole = min(n, rest // stride)
        count += whole * math.prod(size for size, _ in dims[d + 1 :])
        if whole == n:
            return count
        rest -= whole * stride
    return count + (1 if rest > 0 else 0)
