"""AReaL's custom algorithm (ReMax sampling, REINFORCE training) with its imports renamed. Lines that differ otherwise
end with `# changed`, and lines that the page leaves out with `# added`; README.md has the reasons."""

import asyncio
import itertools
import os
import sys
import uuid

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torchdata.stateful_dataloader import StatefulDataLoader

from megarl.areal import (
    FinetuneSpec,
    FSDPEngine,
    InferenceEngine,
    LLMRequest,
    RemoteSGLangEngine,
    RolloutWorkflow,
    TrainEngine,
    WeightUpdateMeta,
    gather_logprobs,
    load_expr_config,
    load_hf_tokenizer,
    stats_tracker,
)
from tests.seeds.areal_grpo import get_gsm8k_dataset, gsm8k_reward_fn, update_weight_path


class ReMaxRLVRWorkflow(RolloutWorkflow):
    def __init__(self, reward_fn, gconfig, tokenizer, enable_thinking=False):  # added
        self.reward_fn, self.gconfig = reward_fn, gconfig  # added
        self.tokenizer, self.enable_thinking = tokenizer, enable_thinking  # added

    async def arun_episode(self, engine: InferenceEngine, data):
        # Prepare input tokens from chat messages
        input_ids = self.tokenizer.apply_chat_template(
            data["messages"],
            tokenize=True,
            add_generation_prompt=True,
            enable_thinking=self.enable_thinking,
        )
        n_samples = self.gconfig.n_samples
        rid = uuid.uuid4().hex
        # Create requests for both sampled and greedy generation
        sample_req = LLMRequest(
            rid=rid,
            input_ids=input_ids,
            gconfig=self.gconfig,
        )
        greedy_req = LLMRequest(
            rid=rid,
            input_ids=input_ids,
            gconfig=self.gconfig.new(greedy=True),
        )
        # Generate both responses concurrently
        resp, greedy_resp = await asyncio.gather(
            engine.agenerate(sample_req),
            engine.agenerate(greedy_req),
        )
        # Calculate rewards for both completions
        input_ids = resp.input_tokens  # added
        prompt_str = self.tokenizer.decode(input_ids)
        completions_str = self.tokenizer.decode(resp.output_tokens)
        sample_reward = self.reward_fn(
            prompt=prompt_str,
            completions=completions_str,
            prompt_ids=resp.input_tokens,
            completion_ids=resp.output_tokens,
            **data,
        )
        greedy_completions = self.tokenizer.decode(greedy_resp.output_tokens)
        greedy_reward = self.reward_fn(
            prompt=prompt_str,
            completions=greedy_completions,
            prompt_ids=greedy_resp.input_tokens,
            completion_ids=greedy_resp.output_tokens,
            **data,
        )
        # Package results for training
        res = dict(
            # Add batch dimension
            input_ids=torch.tensor(resp.input_tokens + resp.output_tokens).unsqueeze(0),
            loss_mask=torch.tensor([0] * resp.input_len + [1] * resp.output_len).unsqueeze(0),
            versions=torch.tensor([-1] * resp.input_len + resp.output_versions).unsqueeze(0),
            attention_mask=torch.ones(resp.input_len + resp.output_len, dtype=torch.bool).unsqueeze(0),
            # Use reward difference across all tokens
            rewards=torch.tensor([[float(sample_reward - greedy_reward)] * (resp.input_len + resp.output_len)]),  # changed
        )
        return TensorDict(res, batch_size=[1])


def reinforce_loss_fn(logits, data):
    input_ids = data["input_ids"]
    loss_mask = data["loss_mask"].bool()
    rewards = data["rewards"]
    logprobs = gather_logprobs(logits, torch.roll(input_ids, shifts=-1, dims=-1))
    loss = -logprobs * rewards
    loss = torch.where(loss_mask, loss, 0.0)
    return loss.sum() / loss_mask.count_nonzero()


class ReinforceActor:
    def __init__(self, engine: TrainEngine):
        self.engine = engine

    def train_reinforce(self, data: TensorDict):
        # Enable gradient checkpointing
        self.engine.train()
        return self.engine.train_batch(
            data,
            loss_fn=reinforce_loss_fn,
            loss_weight_fn=lambda x: x["loss_mask"].count_nonzero(),
        )


class FSDPReinforceActor(FSDPEngine):
    def __init__(self, config):  # changed
        super().__init__(config)  # added
        self.actor = ReinforceActor(self)

    def train_reinforce(self, *args, **kwargs):
        return self.actor.train_reinforce(*args, **kwargs)


def main(args):
    config, _ = load_expr_config(args)  # added
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # added
    max_steps = config.total_train_steps  # added
    ft_spec = FinetuneSpec(1, max_steps, 1)  # added
    tokenizer = load_hf_tokenizer(config.tokenizer_path)  # added
    dataloader = StatefulDataLoader(  # added
        get_gsm8k_dataset("train", rank, world_size),  # added
        batch_size=config.train_dataset.batch_size // world_size,  # added
        collate_fn=list,  # added
    )  # added

    # Initialize inference engine for rollouts
    rollout = RemoteSGLangEngine(config.rollout)
    rollout.initialize(None, ft_spec)

    # Initialize training engine
    actor = FSDPReinforceActor(config=config.actor)
    actor.initialize(None, ft_spec)

    # Create rollout workflow
    workflow = ReMaxRLVRWorkflow(
        reward_fn=gsm8k_reward_fn,
        gconfig=config.gconfig,
        tokenizer=tokenizer,
    )

    # Main training loop
    data_generator = itertools.cycle(dataloader)
    for global_step in range(max_steps):
        # Generate training data
        with stats_tracker.record_timing("rollout"):
            batch = rollout.rollout_batch(next(data_generator), workflow=workflow)

        batch = batch.to(actor.device)
        # Synchronize all processes
        dist.barrier()
        torch.cuda.is_available() and torch.cuda.synchronize()  # changed

        # Training step
        with (
            stats_tracker.record_timing("train_step"),
            stats_tracker.scope("actor"),
        ):
            stats = actor.train_reinforce(batch)
            actor.step_lr_scheduler()

        # Update model weights
        with stats_tracker.record_timing("update_weights"):
            # Weight update logic here
            meta = WeightUpdateMeta("disk", update_weight_path(global_step), global_step + 1)  # added
            actor.upload_weights(meta)  # added
            rollout.set_version(global_step + 1)  # added
        print(f"step {global_step} version {rollout.get_version()} norm {stats['grad_norm']:.6f}", flush=True)  # added

    rollout.destroy()  # added
    actor.destroy()  # added


if __name__ == "__main__":
    main(sys.argv[1:])
