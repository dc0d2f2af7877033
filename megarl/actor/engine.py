"""The training engine on Megatron-core: one model over tp x pp x cp x dp ranks, trained on packed global batches.

global batch -> microbatches of each dp rank -> pipeline schedule -> loss, normalised once -> optimizer
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megarl.actor import data_parallel
from megarl.actor.api import FinetuneSpec, LossFn, LossInput, LossWeightFn, TrainEngine, WeightFormat
from megarl.actor.batch import feed, rank_batches, schedule
from megarl.actor.batch.balance import SequenceCost
from megarl.actor.batch.context_parallel import Cut
from megarl.actor.batch.microbatch import (
    Labels,
    Microbatch,
    build_microbatch,
    check_batch,
    plan_microbatches,
    shift_right,
)
from megarl.actor.checkpoint.engine_state import EngineState, Snapshot
from megarl.actor.checks import device_checks, kernel_checks, knob_checks, model_checks
from megarl.actor.config import EngineConfig
from megarl.actor.engine_weights import EngineWeights
from megarl.actor.gpu import fp8, userbuffers
from megarl.actor.health import SkippedSteps, gradients_are_finite, on_all_ranks
from megarl.actor.model import build, heads, shared_base
from megarl.actor.model.backends import choose_backend
from megarl.actor.model.routing import RoutingReplay
from megarl.actor.mtp import MtpTraining
from megarl.actor.optimizer import build_optimizer, build_scheduler, mtp_grad_norm, step_by_norm
from megarl.actor.reports import WeightedReport, detached, reduced
from megarl.actor.trait_checks import trained_model
from megarl.actor.weights import hf_weights
from megarl.actor.weights.split_marks import check_split_marks
from megarl.device_copies import to_device
from megarl.families import as_scalar, is_scalar, read_config, trains_mtp
from megarl.knobs import UserError, run_all
from megarl.observe.timeline import timeline
from megarl.ops.native import check_values_on_gpu
from megarl.parallel import groups as process_groups
from megarl.parallel import hardware_queues, megatron_patches, platform
from megarl.parallel.broadcast import gather_json
from megarl.parallel.config import ParallelConfig
from megarl.parallel.determinism import OFF, Determinism
from megarl.types import PackedBatch, WeightUpdateMeta, WeightUpdates


class MegatronEngine(TrainEngine):
    """A HF model of a supported family on Megatron-core."""

    def __init__(
        self,
        config: EngineConfig,
        parallel: ParallelConfig | None = None,
        *,
        scalar: bool = False,
        trainable: bool = True,
        deterministic: Determinism = OFF,
    ) -> None:
        """Checks everything that needs no process group.

        Args:
            scalar: gives the model one output per token instead of the vocabulary (see `critic.py`).
            trainable: False builds no gradients and no optimizer (see `reference.py`).
            deterministic: the run's `Config.determinism`. On GPUs it holds for the whole process, until it ends.

        Raises:
            UserError: see `read_config` and `actor/checks.py`.
        """
        self.config = config
        self.parallel = parallel or ParallelConfig()
        self.trainable = trainable
        hardware_queues.enter(self.parallel)  # before the checks ask for GPUs
        run_all([c for checks in (knob_checks, device_checks) for c in checks(config, self.parallel, deterministic)])
        self.hf_config = read_config(config.path)
        if scalar:
            self.hf_config = as_scalar(self.hf_config)
        elif is_scalar(self.hf_config):
            raise UserError(f"actor.path={config.path} gives scores, not text; give a language model's checkpoint")
        elif trainable:
            self.hf_config = trained_model(config, self.hf_config)
        of_model = config, self.parallel, self.hf_config, deterministic
        run_all((*model_checks(*of_model), *kernel_checks(*of_model, trains=trainable)))
        self.backend = choose_backend(config, self.hf_config, deterministic, trainable)
        self._cost = SequenceCost.of(self.hf_config)
        if config.debug_kernels:
            check_values_on_gpu()
        self._weight_updates: WeightUpdates | None = None
        self._skipped = SkippedSteps(config.max_skipped_steps)
        # Set by `initialize`, which joins the process groups.
        self.groups: process_groups.Groups
        self._weights: EngineWeights
        self.modules: list[GPTModel] = []
        self.ddps: list[Any] = []
        self.optimizer: Any = None
        self.scheduler: Any = None
        self._cut = Cut()
        self._head = heads.HeadSettings.of(config, self.parallel.tp_size)
        self._state: EngineState | None = None
        self._mtp: MtpTraining | None = None
        self._replay: RoutingReplay | None = None  # set if the routers replay given experts
        self._on_base = False  # True: shares the frozen model of another engine

    # -- lifecycle -------------------------------------------------------------------------------------------

    def initialize(
        self, addr: str | None = None, ft_spec: FinetuneSpec | None = None, base: MegatronEngine | None = None
    ) -> None:
        """Joins the process groups, builds the model and loads its weights, or takes the frozen ones of `base`.

        With `base`, another engine with adapters, both hold the frozen model once (see `model/shared_base.py`). Give
        memory up and take it back for both together (`offload.py`), and destroy `base` last: it leaves the groups.

        Raises:
            UserError: `base` has another checkpoint, dtype or layout.
        """
        self.groups = process_groups.initialize(self.parallel)
        if base is not None:
            shared_base.check_same(self, base)
        self._on_base = base is not None
        if self.backend.one_thread:
            torch.set_num_threads(1)
        self._cut, self._feed = self._make_cut(), feed.choose(self.device)
        dtype = build.DTYPES[self.config.dtype]
        offloaded = self.config.offload_activations if self.trainable else 0
        self.modules = build.build_model(
            *(self.hf_config, self.groups, dtype, self.backend, self.config.recompute, offloaded),
            base.stages if base else (),
        )
        self._weights = EngineWeights(
            self.config, self.hf_config, self.groups, self.modules, self.trainable, on_base=self._on_base
        )
        if not self.trainable:
            self.ddps = [module.requires_grad_(False) for module in self.modules]
            return
        if trains_mtp(self.hf_config):
            settings = self._head, self.config.mtp_loss_scaling_factor
            self._mtp = MtpTraining(self.hf_config, self.groups, self.backend, self.modules, *settings)
        check_split_marks(self.modules, self._weights.table, self.groups)
        with megatron_patches.scope():
            self.ddps = self._weights.ddps = data_parallel.wrap(self.modules, self.groups)
            self.optimizer = build_optimizer(self.config, self.ddps, dtype)
        self.scheduler = build_scheduler(self.config.optimizer, self.optimizer, ft_spec)
        self._state = EngineState(
            self.modules, self._weights.table, self.optimizer, self.scheduler, self.groups, self.config.path
        )

    def _make_cut(self) -> Cut:
        """Chooses the padding of microbatches, and with `tp_comm_overlap` makes buffers of that size."""
        multiple = max(fp8.token_multiple(self.config.fp8), userbuffers.token_multiple(self.config, self.parallel))
        if not self.parallel.tp_comm_overlap:
            return Cut.of(self.groups, multiple)
        cut = Cut.of(self.groups, multiple, self.config.max_tokens_per_mb)
        userbuffers.initialize(cut.fixed_tokens, self.hf_config.hidden_size, self.groups, self.config.fp8)
        return cut

    def destroy(self) -> None:
        self._state = self.scheduler = self.optimizer = self._mtp = self._replay = None
        data_parallel.release(self.ddps)
        self.ddps, self.modules = [], []
        self.__dict__.pop("_weights", None)
        self.__dict__.pop("groups", None)  # a group's threads end with its last reference
        if not self._on_base:
            userbuffers.destroy()
            process_groups.destroy()

    @property
    def device(self) -> torch.device:
        return platform.device()

    @property
    def stages(self) -> list[GPTModel]:
        """This rank's virtual stages of the model, without layers of multi-token prediction."""
        return self.modules[: self.groups.vpp_size]

    @property
    def data_parallel_rank(self) -> int:
        return self.groups.dp_rank

    @property
    def data_parallel_world_size(self) -> int:
        return self.groups.dp_size

    def train(self, mode: bool = True) -> MegatronEngine:
        for ddp in self.ddps:
            ddp.train(mode)
        return self

    def eval(self) -> MegatronEngine:
        return self.train(False)

    # -- batches ---------------------------------------------------------------------------------------------

    def _microbatches(self, batch: PackedBatch, weigh: LossWeightFn | None = None) -> list[Microbatch]:
        """Builds this rank's microbatches. Weights sum to 1 over all microbatches of all ranks."""
        check_batch(batch, self.hf_config.vocab_size)
        groups, shared = self.groups, self.config.shared_prefix
        multiple = groups.pp_size if groups.vpp_size > 1 else 1
        rows = plan_microbatches(batch, self._cost, groups.dp_size, self.config.max_tokens_per_mb, multiple, shared)
        weights = [[1.0 for _ in row] for row in rows]
        if weigh is not None:
            weights = [[float(weigh(batch.select(part))) if part else 0.0 for part in row] for row in rows]
        total = math.fsum(w for row in weights for w in row)
        if weigh is not None and not (total > 0 and math.isfinite(total)):
            raise UserError(f"the batch's loss weights sum to {total}; at least one token must be trained on")
        targets = self._mtp.targets(batch, rows, weights) if weigh is not None and self._mtp is not None else []
        of_rank = zip(rows[groups.dp_rank], weights[groups.dp_rank], strict=True)
        return [self._microbatch(batch, part, weight / total, targets) for part, weight in of_rank]

    def _microbatch(
        self, batch: PackedBatch, indices: list[int], weight: float, targets: Sequence[int] = ()
    ) -> Microbatch:
        share = self.backend.share if self.config.shared_prefix else None
        return build_microbatch(batch, indices, weight, self.device, self._cut, share, self.backend.pack, targets)

    def _run(self, microbatches: list[Microbatch], process: Callable[..., Any], forward_only: bool) -> list[Any]:
        """Runs the pipeline schedule. The last stage calls `process(output, microbatch)` for each microbatch."""
        self._head.kept.begin()
        stages = self.ddps[: self.groups.vpp_size]
        passing = None if self._replay is None else self._replay.begin(trains=not forward_only)
        with timeline.span("forward" if forward_only else "forward and backward"):
            return schedule.run(stages, microbatches, self._feed, process, self.groups, forward_only, passing)

    def run_forward(self, microbatches: list[Microbatch], process: Callable[[Tensor, Microbatch], Tensor]) -> list[Any]:
        """Results of `process` on the last stage's outputs, forward only; [] on the other stages."""
        return self._run(microbatches, schedule.as_loss(process), forward_only=True)

    # Loss inputs from the last stage's output: complete sequences, `[tokens, ...]`, on every layout.

    def _hidden(self, output: Tensor, mb: Microbatch) -> Tensor:
        data_parallel.await_parameter(self.ddps, heads.weight_of(self.stages[-1]))
        return heads.hidden_states(output, self.stages[-1], self.groups, mb.shared)

    def _logits(self, output: Tensor, mb: Microbatch) -> Tensor:
        local = heads.logits(self._hidden(output, mb), self.stages[-1], self.groups, self.hf_config.vocab_size)
        return mb.gather(local, self.groups.cp)

    def _values(self, output: Tensor, mb: Microbatch) -> Tensor:
        return mb.gather(heads.values(self._hidden(output, mb), self.stages[-1]), self.groups.cp)

    def _logprobs(
        self, output: Tensor, mb: Microbatch, labels: Labels, with_entropy: bool = True, gradients: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        hidden = self._hidden(output, mb)
        logprobs, entropy = self.backend.logprobs(
            hidden,
            labels,
            heads.weight_of(self.stages[-1]),
            self.groups,
            self.hf_config.vocab_size,
            self._head,
            with_entropy,
            gradients,
        )
        cp = self.groups.cp
        return mb.gather(logprobs, cp), mb.gather(entropy, cp) if entropy is not None else None

    # -- training --------------------------------------------------------------------------------------------

    def _loss_process(self, loss_fn: LossFn, loss_input: LossInput) -> Callable[..., Any]:
        def process(output: Tensor, mb: Microbatch) -> tuple[Tensor, Tensor, list[WeightedReport]]:
            loss, reports = self._main_loss(output, mb, loss_fn, loss_input)
            if self._mtp is not None:
                mtp_loss = self._mtp.loss(output, mb)
                loss = loss + self._mtp.factor * mtp_loss
                reports.append((1.0, {"mtp_loss": mtp_loss.detach()}))
            return loss, torch.zeros([], dtype=torch.int), reports  # Megatron's token count; the weights replace it

        return process

    def _main_loss(
        self, output: Tensor, mb: Microbatch, loss_fn: LossFn, loss_input: LossInput
    ) -> tuple[Tensor, list[WeightedReport]]:
        """Computes a microbatch's weighted loss of `loss_fn`, and its report."""
        if mb.weight == 0:
            return heads.no_loss(output, self.stages[-1]), []
        if loss_input == "logits":
            result = loss_fn(self._logits(output, mb), mb.batch)
        elif loss_input == "values":
            result = loss_fn(self._values(output, mb), mb.aligned)
        elif callable(loss_input):
            result = loss_fn(*loss_input(output, mb), mb.aligned)
        else:
            result = loss_fn(*self._logprobs(output, mb, mb.trained_labels), mb.aligned)
        loss, metrics = result if isinstance(result, tuple) else (result, {})
        return loss * mb.weight, [(mb.weight, detached({**metrics, "loss": loss}))]

    def _loss_microbatches(self, data: Any, weigh: LossWeightFn, loss_input: LossInput) -> list[Microbatch]:
        batch = rank_batches.join(data, self.groups)[0]
        microbatches = self._microbatches(batch, weigh)
        if callable(loss_input):
            loss_input.prepare(batch, microbatches)
        return microbatches

    def train_batch(
        self, data: Any, loss_fn: LossFn, loss_weight_fn: LossWeightFn, loss_input: LossInput = "logits"
    ) -> dict[str, float]:
        if not self.trainable:
            raise UserError("train_batch on a frozen engine: build it with trainable=True")
        microbatches = self._loss_microbatches(data, loss_weight_fn, loss_input)
        for ddp in self.ddps:
            ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        with self._weights.masks_of_step():
            stats = self._losses(microbatches, loss_fn, loss_input, forward_only=False)
        return {**stats, **self._step(stats["loss"])}

    def _step(self, loss: float) -> dict[str, float]:
        """Steps the optimizer on every rank, or on none if the loss or a gradient is not finite on any rank."""
        with timeline.span("optimizer"), megatron_patches.scope():
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm())
            norms = {"grad_norm": norm}
            if self._mtp is not None:
                norms["mtp_grad_norm"] = mtp_grad_norm(self.optimizer)
            finite = on_all_ranks(math.isfinite(loss) and math.isfinite(norm) and gradients_are_finite(self.ddps))
            if finite:
                step_by_norm(self.optimizer, *norms.values())
                self._weights.steps += 1
        self._skipped.record(not finite, loss, norm)
        return {**norms, "lr": self.optimizer.param_groups[0]["lr"], "skipped_steps": float(not finite)}

    def eval_batch(
        self, data: Any, loss_fn: LossFn, loss_weight_fn: LossWeightFn, loss_input: LossInput = "logits"
    ) -> dict[str, float]:
        microbatches = self._loss_microbatches(data, loss_weight_fn, loss_input)
        with torch.no_grad():
            return self._losses(microbatches, loss_fn, loss_input, forward_only=True)

    def _losses(
        self, microbatches: list[Microbatch], loss_fn: LossFn, loss_input: LossInput, forward_only: bool
    ) -> dict[str, float]:
        """Runs the microbatches through model and loss, and returns the batch's metrics."""
        if self._mtp is not None:
            self._mtp.refresh(self.ddps)
        reports = self._run(microbatches, self._loss_process(loss_fn, loss_input), forward_only)
        return reduced([report for of_microbatch in reports for report in of_microbatch], self.groups)

    def step_lr_scheduler(self) -> None:
        self.scheduler.step(1)

    # -- inference -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(
        self,
        data: Any,
        post_hook: Callable[[Tensor, PackedBatch], Tensor] | None = None,
        aggregate: Callable[[list[Tensor]], Tensor] = torch.cat,
    ) -> Tensor:
        def process(out: Tensor, mb: Microbatch) -> Tensor:
            logits = self._logits(out, mb)
            return logits if post_hook is None else post_hook(logits, mb.batch)

        return aggregate(self._collect(data, process))

    @torch.no_grad()
    def logprobs(self, data: Any, trained_only: bool = False) -> Tensor:
        """Computes log-probs of the batch's tokens, float32 `[total_tokens]`, token-aligned, on the host.

        With `trained_only`, only tokens in `loss_mask` are computed, and the rest are 0. This saves the LM head's work
        on the other tokens.
        """

        def process(out: Tensor, mb: Microbatch) -> Tensor:
            labels = mb.trained_labels if trained_only else mb.labels
            logprobs, _ = self._logprobs(out, mb, labels, with_entropy=False)
            return shift_right(logprobs, mb.last)

        return torch.cat(self._collect(data, process))

    def _collect(self, data: Any, process: Callable[[Tensor, Microbatch], Tensor]) -> list[Tensor]:
        """Runs forward only and returns one tensor per sequence of this rank's batch, in its order."""
        batch, local = rank_batches.join(data, self.groups)
        microbatches = self._microbatches(batch)
        outputs = self.run_forward(microbatches, process)
        local_facts = None  # only the last stage has outputs
        if outputs:
            first = outputs[0]
            per_token = first.shape[0] == microbatches[0].batch.total_tokens
            local_facts = [per_token, list(first.shape[1:]), str(first.dtype)]
        per_token, tail, dtype = next(facts for facts in gather_json(local_facts) if facts is not None)
        rows = batch.total_tokens if per_token else batch.num_seqs
        full = torch.zeros(rows, *tail, dtype=getattr(torch, dtype.removeprefix("torch.")), device=self.device)
        for mb, output in zip(microbatches, outputs, strict=False):
            if mb.indices:
                index = batch.token_index(mb.indices) if per_token else torch.tensor(mb.indices)
                full[to_device(index, self.device)] = output
        rows_on_host = rank_batches.rows_on_all_ranks(full, self.groups)
        return (batch.split(rows_on_host) if per_token else list(rows_on_host.split(1)))[local]

    # -- weights and state -----------------------------------------------------------------------------------

    def shards(self) -> list[hf_weights.Shard]:
        """Lists the boxes of HF tensors that this rank holds, as servers take them. See `EngineWeights.shards`."""
        return self._weights.shards()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the complete HF tensors of `shards` by name, on rank 0's host (`hf_weights.gather`). A collective."""
        return self._weights.named()

    def save(self, path: str | Path, weight_format: WeightFormat = "hf") -> None:
        if weight_format == "native":
            self.save_state(Path(path))
        else:
            self._weights.save(Path(path))

    def load(self, path: str | Path, weight_format: WeightFormat = "hf") -> None:
        if weight_format == "native":
            self.load_state(Path(path))
            return
        self._weights.load(str(path))
        if self._state is not None:
            self._state.follow_parameters()

    def base_alone(self) -> AbstractContextManager[None]:
        """Context in which an engine with adapters runs without them. Other engines have none."""
        return nullcontext() if self._weights.lora is None else self._weights.lora.switched_off()

    def connect(self, updates: WeightUpdates) -> None:
        self._weight_updates = updates

    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        if self._weight_updates is not None:
            self._weight_updates.upload(self, meta)
        elif meta.path is not None:
            self.save(meta.path)
        else:
            raise UserError(
                f"type={meta.type} needs a session with the servers: call connect(session) first, or use disk"
            )

    def snapshot_state(self) -> Snapshot:
        assert self._state is not None, "initialize first, with trainable=True"
        return self._state.snapshot()

    def load_state(self, folder: Path) -> None:
        assert self._state is not None, "initialize first, with trainable=True"
        self._weights.steps = self._state.load(folder)
