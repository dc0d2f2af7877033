"""Text of a trained or evaluated sequence, as run folders keep it."""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor


def turns_of(tokenizer: Any, ids: Tensor, mask: Tensor) -> list[list[Any]]:
    """Turns of one sequence as `[sampled, text]`: what the model read (False) and wrote (True), in order.

    `ids` and `mask` are `[tokens]`; `mask` marks sampled tokens. Special tokens stay in the text.
    """
    runs = itertools.groupby(zip(ids.tolist(), mask.tolist(), strict=True), key=lambda pair: bool(pair[1]))
    spans = [(sampled, [token for token, _ in pairs]) for sampled, pairs in runs]
    texts = tokenizer.batch_decode([tokens for _, tokens in spans])
    return [[sampled, text] for (sampled, _), text in zip(spans, texts, strict=True)]
