"""AReaL's SFT example with its imports renamed. Lines that differ otherwise end with `# changed`, and lines that the
page leaves out with `# added`; README.md has the reasons."""

import os
import sys

from datasets import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from megarl.areal import (
    FinetuneSpec,
    FSDPLMEngine,
    load_expr_config,
    load_hf_tokenizer,
    pad_sequences_to_tensors,
    split_dataset_by_node,
)
from megarl.data.prompts import load_gsm8k


def process_gsm8k_sft_dataset(dataset: Dataset, tokenizer):
    def process(sample):
        seq_token = tokenizer.encode(sample["question"] + sample["answer"] + tokenizer.eos_token)
        prompt_token = tokenizer.encode(sample["question"])
        loss_mask = [0] * len(prompt_token) + [1] * (len(seq_token) - len(prompt_token))
        return {"input_ids": seq_token, "loss_mask": loss_mask}

    # Remove unnecessary columns to avoid errors during collation
    dataset = dataset.map(process).remove_columns(["question", "answer"])
    return dataset


def get_gsm8k_dataset(split, tokenizer, rank, world_size):
    dataset = load_gsm8k(path="arithmetic", name="main", split=split)  # changed
    dataset = split_dataset_by_node(dataset, rank=rank, world_size=world_size)
    return process_gsm8k_sft_dataset(dataset, tokenizer)


def main(args):
    config, _ = load_expr_config(args)  # added
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # added
    tokenizer = load_hf_tokenizer(config.tokenizer_path)  # added
    engine = FSDPLMEngine(config.actor)  # added
    engine.initialize(None, FinetuneSpec(1, config.total_train_steps, 1))  # added
    total_epochs = config.total_train_steps  # added

    # Create dataset and dataloaders
    train_dataloader = StatefulDataLoader(
        get_gsm8k_dataset("train[:8]", tokenizer, rank, world_size),  # changed
        collate_fn=pad_sequences_to_tensors,
        batch_size=config.train_dataset.batch_size // world_size,  # added
    )
    # Run training loop
    for epoch in range(total_epochs):
        for step, data in enumerate(train_dataloader):
            stats = engine.train_lm(data)
            print(f"epoch {epoch} step {step} loss {stats['loss']:.6f}", flush=True)  # added


if __name__ == "__main__":
    main(sys.argv[1:])
