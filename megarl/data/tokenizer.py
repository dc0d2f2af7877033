"""The tokenizer of the bundled tiny model, made from the bundled task, and the check that a tokenizer fits a model."""

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

# A digit is always a token of its own. A space before a digit goes with the word on its left ("has ", "7"), and the
# last line's "\n#### " is one piece: a problem costs few tokens and a digit looks the same wherever it stands.
PIECES = r"\n#### ?|\d| ?\p{L}+(?: (?=\d))?| ?[^\s\p{L}\d]+|\s"

# Each turn is its role's token and its text; an assistant's turn ends with eos, as its completions do.
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
    """A byte-level BPE over the bundled train split. Every string can be encoded; the same vocabulary every time."""
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
    """The tokenizer of a checkpoint folder or hub name, for workflows of one's own.

    Its `apply_chat_template(..., tokenize=True)` gives a plain list of ids, which `decode` reads; transformers 5 gives
    a mapping unless told `return_dict=False`.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, return_dict=False)
    return tokenizer


def check_vocabulary(tokenizer: Any, vocab_size: int, path: str) -> None:
    """Raises `UserError` where the tokenizer has a token id that the model at `path` has no row for."""
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab_size:
        raise UserError(
            f"the tokenizer has token ids up to {largest}, the model {path} has a vocabulary of {vocab_size}; "
            "every id must be below it: give the tokenizer that belongs to this model"
        )
