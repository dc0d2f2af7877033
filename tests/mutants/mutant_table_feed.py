"""Bugs written by hand in copies to the device, the feed and cut of microbatches, and the order of messages."""

from __future__ import annotations

from mutant import Bugs, unit

DEVICE = ("tests/fake_cuda/test_fake_cuda.py",)

FEED: Bugs = {
    "megarl/actor/batch/feed.py": {
        unit("actor/test_feed"): [
            ("kernels do not wait for the copy", "stream.wait_event(arrived)", "pass"),
            (
                "memory is given back while kernels read it",
                "mb.input_ids.record_stream(stream)",
                "stream",
            ),
            ("copies are on the stream of the kernels", "with torch.cuda.stream(self._stream):", "if True:"),
            ("nothing is copied ahead", "min(number + 2, len", "min(number + 1, len"),
            ("each virtual stage copies for itself", "if number in self._started or", "if"),
            ("copies stay until the pass ends", "if not self._takers[number]:", "if False:"),
            ("the first virtual stage takes a copy away", "[takers] * len(microbatches)", "[1] * len(microbatches)"),
            ("the host gets copies", 'if device.type == "cuda"', 'if device.type == "cpu"'),
        ],
    },
    "megarl/device_copies.py": {
        DEVICE: [
            ("parts are not aligned", "-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT", "tensor.nbytes + 8"),
            ("staging memory is not pinned", "pin_memory=True", "pin_memory=False"),
            ("a write to one part is one to all", "return view.data", "return view"),
        ],
        unit("test_device_copies"): [
            ("lists are left out", "isinstance(value, (list, tuple))", "isinstance(value, tuple)"),
            ("a batch keeps its tensors", "isinstance(value, HoldsTensors) or", ""),
        ],
    },
    "megarl/actor/batch/balance.py": {
        unit("actor/test_balance"): [
            ("empty parts meet nothing", "rest = other[empty:]", "rest = other[:0]"),
            ("an empty part is not the lightest", "if len(joined) == parts else 0.0", "if joined else 0.0"),
        ],
    },
    "megarl/reshard/transfer/copies.py": {
        unit("reshard/test_copies"): [
            ("casts are among the others", "target.dtype == source.dtype and", ""),
            ("strided parts are among the others", " and target.is_contiguous() and source.is_contiguous()", ""),
        ],
    },
    "megarl/reshard/plan/sender_choice.py": {
        unit("reshard/test_planner"): [
            ("ranks wait for busy peers", "if least <= now:", "if True:"),
            ("messages take no time", "max(now, free[other]) + sizes[first]", "max(now, free[other])"),
        ],
    },
    "megarl/actor/sizes/memory.py": {
        unit("actor/test_memory"): [
            ("the copy ahead is not counted", "min(in_flight + 1, load", "min(in_flight, load"),
            (
                "a GPU is counted to hold all",
                "if on_gpu else load.all_tokens",
                "if 0 else load.all_tokens",
            ),
        ],
    },
    "megarl/actor/batch/rank_batches.py": {
        DEVICE: [
            ("a batch on the device is cut there", 'batch if batch.device.type == "cpu" else', "batch or"),
        ],
    },
}
