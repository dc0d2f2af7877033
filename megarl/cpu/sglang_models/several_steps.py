"""Several generation steps in one pass of SGLang's scheduler, on CPU.

SGLang's scheduler spends a millisecond of Python a step, more than the step of a small model takes. Only speculative
decoding lets it take several tokens from one step. So this is an algorithm by that interface, without speculation: the
model samples token after token, and all tokens count. SGLang truncates tokens past a request's end.
"""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import torch
from sglang.kernels.ops.kvcache import cache_move
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache import allocation
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType, SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo
from torch import Tensor

from megarl.cpu.sglang_platform import SEVERAL_STEPS

MAX_PASS_S = 0.02  # seconds until the scheduler must run again; larger models take one step a pass


class LastTokens(SpecInput):
    """Last token of each request of a batch, int64 `[num_seqs]`: the input of its next step."""

    def __init__(self, tokens: Tensor):
        super().__init__(SpecInputType.NGRAM_VERIFY)  # SGLang's kind without a draft model
        self.tokens = tokens

    def filter_batch(self, new_indices: Tensor, new_indices_cpu: list[int] | None = None) -> None:
        """Keeps only these requests; called by SGLang."""
        self.tokens = self.tokens[new_indices]

    def merge_batch(self, spec_info: LastTokens) -> None:
        """Appends the requests of another batch; called by SGLang."""
        self.tokens = torch.cat([self.tokens, spec_info.tokens])


class SeveralSteps(BaseSpecWorker):
    """Runs prompts by SGLang's own worker, and decodes as many steps as cache slots are reserved for."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any):
        super().__init__()
        self._target_worker = target_worker
        self._draft_worker = None

    def forward_batch_generation(self, batch: Any, on_publish: Any = None, pp_proxy_tensors: Any = None) -> Any:
        """Runs one pass without overlap: tokens `[num_seqs * steps]`, log-probs `[num_seqs, steps]`."""
        if not batch.forward_mode.is_decode():
            result = self.target_worker.forward_batch_generation(batch)
            output, tokens, lengths = result.logits_output, result.next_token_ids[:, None], batch.seq_lens.clone()
        else:
            start, reserved = batch.seq_lens, min(r.kv.kv_allocated_len - r.kv.kv_committed_len for r in batch.reqs)
            wanted = max(r.sampling_params.max_new_tokens - len(r.output_ids) for r in batch.reqs)
            columns = start + torch.arange(min(reserved, wanted))[:, None]
            slots = batch.req_to_token_pool.req_to_token[batch.req_pool_indices, columns].long()
            # The state in which SGLang leaves a batch for one step: lengths count the input token.
            batch.input_ids, batch.out_cache_loc, batch.spec_info = batch.spec_info.tokens, slots[0], None
            batch.seq_lens, batch.seq_lens_cpu, batch.seq_lens_sum = start + 1, batch.seq_lens_cpu + 1, None
            if self._is_plain(batch):
                output, tokens = self._sample(batch, slots)
            else:
                result = self.target_worker.forward_batch_generation(batch)
                output, tokens = result.logits_output, result.next_token_ids[:, None]
                if batch.return_logprob:
                    output.next_token_logprobs = output.next_token_logprobs[:, None]
            lengths = start + tokens.shape[1]
        return GenerationBatchResult(
            logits_output=output, next_token_ids=tokens.flatten(), can_run_cuda_graph=False, new_seq_lens=lengths,
            accept_lens=torch.full((len(tokens),), tokens.shape[1], dtype=torch.int32),
            next_draft_input=LastTokens(tokens[:, -1].long()), speculative_output_stride=tokens.shape[1],
        )  # fmt: skip

    def _is_plain(self, batch: Any) -> bool:
        """True if steps need nothing from SGLang in between, and run in `fused_step`."""
        model, info = self.target_worker.model_runner.model, batch.sampling_info
        return (
            bool(getattr(model, "fused_layers", None))
            and only_temperature(info, batch.top_logprobs_nums, batch.token_ids_logprobs)
            and info.acc_additive_penalties is None
            and info.acc_scaling_penalties is None
            and not info.has_custom_logit_processor
            and not batch.has_grammar
            and not batch.return_hidden_states
            and not any(_ends_elsewhere(request) for request in batch.reqs)
        )

    def _sample(self, batch: Any, slots: Tensor) -> tuple[Any, Tensor]:
        """Samples one token a row of `slots`, fewer if that takes too long: `[num_seqs, steps]`."""
        runner = self.target_worker.model_runner
        deadline = time.monotonic() + MAX_PASS_S
        step = ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)
        tokens, logprobs = [], []
        with forward_context(ForwardContext(attn_backend=runner.attn_backend), forward_batch=step):
            for slot in slots:
                step.out_cache_loc = slot
                output = runner.model.forward(step.input_ids, step.positions, step)
                step.input_ids = runner.sample(output, step)
                step.positions = step.positions + 1
                tokens.append(step.input_ids)
                logprobs.append(output.next_token_logprobs)
                if time.monotonic() > deadline:
                    break
        if batch.return_logprob:
            output.next_token_logprobs = torch.stack(logprobs, 1)
        return output, torch.stack(tokens, 1)


class SeveralStepsAlgorithm(CustomSpecAlgo):
    """Entry of `SeveralSteps` in SGLang's registry of algorithms, with methods that its base class lacks."""

    def has_draft_kv(self) -> bool:
        """Returns False: there is no draft model."""
        return False

    def carries_draft_hidden_states(self) -> bool:
        """Returns False: there is no draft model."""
        return False

    def create_future_map(self, *args: Any, **kwargs: Any) -> Any:
        """Takes SGLang's default."""
        return SpeculativeAlgorithm.create_future_map(self, *args, **kwargs)


def only_temperature(info: Any, top_logprobs_nums: list[int] | None, token_ids_logprobs: list[Any] | None) -> bool:
    """True if only the temperature shapes the distribution and only sampled tokens' log-probs are asked for.

    SGLang's lists are None if no request of the batch asks for log-probs.
    """
    filtered = info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling
    special = (
        info.is_any_greedy or info.sampling_seed is not None or info.sampling_mask_batch_indices is not None
        or info.grammars
    )  # fmt: skip
    return not (filtered or special or any(top_logprobs_nums or ()) or any(token_ids_logprobs or ()))


def _ends_elsewhere(request: Any) -> bool:
    """True if SGLang could end this request at the wrong token of several.

    It keeps all tokens of a request that is being aborted. Of several stop texts it takes the first of its list, not
    the first in the answer.
    """
    params = request.sampling_params
    return bool(request.to_finish or params.stop_strs or params.stop_regex_strs)


def write_slots(requests: Tensor, table: Tensor, start: Tensor, end: Tensor, slots: Tensor, width: int) -> None:
    """Writes each request's part of `slots` to columns `[start, end)` of its row of `table`."""
    counts = (end - start).long()
    rows = requests.long().repeat_interleave(counts)
    columns = torch.arange(len(rows)) + (end - counts.cumsum(0)).repeat_interleave(counts)
    table[rows, columns] = slots.to(table.dtype)


def copy_slots(data: Tensor, strides: Tensor, to: Tensor, source: Tensor) -> None:
    """Stands in for the move of cache slots between drafts. SGLang calls it once, to move a slot onto itself."""
    if not torch.equal(to, source):
        raise RuntimeError(
            "several drafts of a token need sgl_kernel, which has no wheel for CPUs: leave out "
            "sglang.speculative_algorithm"
        )


SpeculativeAlgorithm.register(SEVERAL_STEPS, supports_overlap=False, spec_class=SeveralStepsAlgorithm)(
    lambda args: SeveralSteps
)
if importlib.util.find_spec("sgl_kernel") is None:  # the package of both functions has no wheel for CPUs
    allocation.assign_req_to_token_pool_cpu = write_slots
    cache_move.copy_all_layer_kv_cache_cpu = copy_slots
