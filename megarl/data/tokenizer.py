"""Trains the tokenizer of the bundled tiny model, loads tokenizers, and checks that a tokenizer fits a model."""

import functools
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megarl.data.arithmetic import generate
from megarl.knobs import UserError

VOCAB_SIZE = 353
EOS, PAD = "<|endoftext|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")

# Every digit is a separate token. A space before a digit belongs to the word on its left ("has ", "7"), and "\n#### "
# of the last line is one piece. A problem thus takes few tokens, and a digit has the same token everywhere.
PIECES = r"\n#### ?|\d| ?\p{L}+(?: (?=\d))?| ?[^\s\p{L}\d]+|\s"

# A turn is the role's token and the text. An assistant turn ends with eos, as a completion does.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' ~ message['role']) }}{% endif %}"
    "{{ '<|' ~ message['role'] ~ '|>' ~ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE on the bundled train split. Deterministic, and able to encode every string."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS, PAD, *ROLES],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for row in generate("train") for text in row.values()), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=list(ROLES),
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def write_tokenizer(folder: Path) -> None:
    """Writes the bundled tokenizer as a Hugging Face tokenizer folder."""
    train_tokenizer().save_pretrained(folder)


def load_hf_tokenizer(path: str | Path) -> Any:
    """Loads the tokenizer of a checkpoint folder or hub name, for use in custom workflows.

    Its `apply_chat_template(..., tokenize=True)` returns a plain list of ids for `decode`. In transformers 5 it returns
    a mapping unless called with `return_dict=False`.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, return_dict=False)
    return tokenizer


def check_vocabulary(tokenizer: Any, vocab_size: int, path: str) -> None:
    """Raises `UserError` if the tokenizer has a token id outside the vocabulary of the model at `path`."""
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab_size:
        raise UserError(
            f"the tokenizer has token ids up to {largest}, the model {path} has a vocabulary of {vocab_size}; "
            "every id must be below it: give the tokenizer that belongs to this model"
        )
