"""AReaL's GSM8K GRPO walk-through with its imports renamed. Lines that differ otherwise end with `# changed`, and lines
that the page leaves out with `# added`; README.md has the reasons."""

import os
import shutil
import sys

import torch
import torch.distributed as dist
import torchdata.stateful_dataloader as torchdata
from datasets import Dataset

from megarl.areal import (
    FinetuneSpec,
    FSDPPPOActor,
    GRPOConfig,
    RemoteSGLangEngine,
    RLVRWorkflow,
    WeightUpdateMeta,
    extract_answer,
    extract_solution,
    load_expr_config,
    load_hf_tokenizer,
    log_gpu_stats,
    split_dataset_by_node,
)
from megarl.data.prompts import load_gsm8k

RUN_FOLDER = os.environ["MEGARL_RUN_FOLDER"]  # added


def process_gsm8k_rl_dataset(dataset: Dataset):
    def process(sample):
        messages = [{"role": "user", "content": sample["question"]}]
        return {"messages": messages}

    dataset = dataset.map(process).remove_columns(["question"])
    return dataset


def get_gsm8k_dataset(split, rank, world_size):
    dataset = load_gsm8k(path="arithmetic", name="main", split=split)  # changed
    dataset = split_dataset_by_node(dataset, rank=rank, world_size=world_size)
    return process_gsm8k_rl_dataset(dataset)


def gsm8k_reward_fn(prompt, completions, prompt_ids, completion_ids, answer, **kwargs):
    sol = extract_answer(completions, data_name="math")
    ans = extract_solution(solution_str=answer, method="strict")
    if sol is None:
        return 0
    if ans is None:
        return 0
    return int(sol.strip() == ans.strip())


def update_weight_path(global_step):  # added
    return f"{RUN_FOLDER}/weights/{global_step}"  # added


def main(args):
    config, _ = load_expr_config(args, GRPOConfig)
    config: GRPOConfig
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # added
    max_steps = config.total_train_steps  # added
    ft_spec = FinetuneSpec(1, max_steps, 1)  # added

    train_dataloader = torchdata.StatefulDataLoader(
        get_gsm8k_dataset("train", rank, world_size),
        batch_size=config.train_dataset.batch_size // world_size,
        shuffle=config.train_dataset.shuffle,
        num_workers=config.train_dataset.num_workers,
        collate_fn=lambda x: x,
        drop_last=config.train_dataset.drop_last,
    )

    tokenizer = load_hf_tokenizer(config.tokenizer_path)
    workflow = RLVRWorkflow(
        reward_fn=gsm8k_reward_fn,
        gconfig=config.gconfig,
        tokenizer=tokenizer,
    )

    rollout = RemoteSGLangEngine(config.rollout)
    rollout.initialize()

    actor = FSDPPPOActor(config=config.actor)
    actor.initialize(None, ft_spec)
    ref = None
    if config.actor.kl_ctl > 0 and config.ref is not None:
        ref = FSDPPPOActor(config=config.ref)
        ref.initialize(None, ft_spec)

    data_generator = iter(train_dataloader)
    for global_step in range(max_steps):
        if config.async_training:
            batch = rollout.prepare_batch(train_dataloader, workflow=workflow)
        else:
            try:
                data = next(data_generator)
            except StopIteration:
                data_generator = iter(train_dataloader)
                data = next(data_generator)
            batch = rollout.rollout_batch(data, workflow=workflow)

        batch = batch.to(actor.device)
        # Create barrier to synchronize all rollout processes.
        dist.barrier()
        torch.cuda.is_available() and torch.cuda.synchronize()  # changed

        logp = actor.compute_logp(batch)
        batch["prox_logp"] = logp
        if ref is not None:
            batch["ref_logp"] = ref.compute_logp(batch)
            log_gpu_stats("ref logp")

        actor.compute_advantages(batch)
        stats = actor.ppo_update(batch)
        actor.step_lr_scheduler()

        path = update_weight_path(global_step)
        meta = WeightUpdateMeta(type="disk", path=path, model_version=global_step + 1)
        # send requests to remote servers, tell them to update weights
        if dist.get_rank() == 0:
            future = rollout.update_weights(meta)
        # actor save weights
        actor.upload_weights(meta)
        # remote servers returns after finishing updates
        if dist.get_rank() == 0:
            future.result()
            shutil.rmtree(path, ignore_errors=True)
        # synchronize rollout processes for model version update
        dist.barrier()
        torch.cuda.is_available() and torch.cuda.synchronize()  # changed
        # update version for rollout engine
        rollout.set_version(global_step + 1)
        report(rank, rollout, batch, stats, ref)  # added

    rollout.destroy()  # added
    actor.destroy()  # added


def report(rank, rollout, batch, stats, ref):  # added
    """Prints figures for the test, on each rank."""
    folder = os.path.join(RUN_FOLDER, f"seed_rank_{rank}.txt")
    with open(folder, "a") as file:
        gap = (batch["prox_logp"] - batch["rollout_logprobs"])[batch["loss_mask"].bool()].abs().mean()
        newest = int(batch["versions"].max())
        values = (rollout.get_version(), newest, float(gap), stats["loss"], stats["grad_norm"], batch.num_seqs)
        print(*values, ref is not None, file=file)


if __name__ == "__main__":
    main(sys.argv[1:])
