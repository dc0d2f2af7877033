"""GSM8K as token sequences with a loss mask, for supervised fine-tuning."""

from typing import Any

from datasets import Dataset

from megarl.data.prompts import keep_within, load_gsm8k, mapped, prompt_ids
from megarl.knobs import UserError


def get_gsm8k_sft_dataset(
    path: str, split: str, tokenizer: Any, max_length: int | None = None, name: str = "main", instruction: str = ""
) -> Dataset:
    """Rows of `input_ids` and `loss_mask` (0 on the prompt, 1 on the answer and its end-of-sequence token).

    The prompt is the one that a rollout sends (the tokenizer's chat template where it has one, else the question as
    it stands). Prompt and answer are tokenised apart, so no token spans the two. Sequences of more than `max_length`
    tokens are dropped with a warning that lists them.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no eos token, so a model could not learn to stop; set tokenizer.eos_token")
    dataset = load_gsm8k(path, split, name)
    dataset = mapped(
        dataset, _to_tokens, {"tokenizer": tokenizer, "instruction": instruction}, remove=dataset.column_names
    )
    return keep_within(dataset, max_length, "sequences", lambda row: len(row["input_ids"]))


def _to_tokens(row: dict[str, Any], tokenizer: Any, instruction: str) -> dict[str, list[int]]:
    prompt = prompt_ids(tokenizer, [{"role": "user", "content": row["question"] + instruction}])
    answer = [*tokenizer.encode(row["answer"], add_special_tokens=False), tokenizer.eos_token_id]
    return {"input_ids": prompt + answer, "loss_mask": [0] * len(prompt) + [1] * len(answer)}
