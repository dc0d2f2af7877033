"""The knobs of a data set, in a module that loads fast."""

from dataclasses import dataclass

from megarl.knobs import knob

BUNDLED = "arithmetic"


@dataclass(frozen=True)
class DatasetConfig:
    """A data set and how it is cut into batches."""

    path: str = knob(BUNDLED, f"{BUNDLED} (bundled), a hub name such as openai/gsm8k, or a local folder or file")
    name: str = knob("main", "the data set's configuration on the hub, its subfolder on disk")
    split: str = knob("train", "which split, with a slice if wanted: train[:100]")
    instruction: str = knob("", "appended to every question, such as an order to end with '#### N'")
    max_length: int | None = knob(
        None, "rows over this many tokens are skipped (RL: the prompt; SFT: prompt and answer)"
    )
    batch_size: int = knob(32, "rows a step, over all ranks")
    shuffle: bool = knob(True, "a new order every epoch; false keeps the file's order")
    seed: int = knob(0, "the orders' seed")
    drop_last: bool = knob(True, "leave out an epoch's last batch where it is not full")
    num_workers: int = knob(0, "processes that load rows; 0 loads in the trainer")
