"""Gemma 3 on a real SGLang server: pushed weights are served, and windows are honoured as in transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from weights_support import TOLERANCE, Served, weights_of

from megarl.rollout.servers.sglang_server import SGLangServers
from tests.sglang.tiny_models import make_model


def test_pushed_weights_are_what_gemma3_serves(
    serve: Callable[..., SGLangServers], tiny_checkpoint: Callable[..., Path]
) -> None:
    served = Served(serve(tiny_checkpoint("gemma3_text")), bucket_bytes=50_000)
    for seed, path in ((1, "exact"), (2, "full")):
        if path == "full":
            served.restart_session(path="full")
        model = make_model("gemma3_text", True, seed)
        assert served.difference(model) > 0.1
        report = served.push(weights_of(model))
        assert served.difference(model) < TOLERANCE
        assert report.verified >= len(weights_of(model).tensors)
    served.session.close()
    served.servers.stop()
