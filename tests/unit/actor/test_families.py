"""Checkpoints that the actor refuses, each in one line, before Megatron is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.actor.families import check_layout, local_folder, padded_vocab_size, read_config
from megarl.knobs import UserError
from megarl.parallel.config import ParallelConfig


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("qwen3", {"model_type": "mamba"}, "'mamba' model; supported are llama, qwen2, qwen3"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act=gelu; supported is silu"),
        ("qwen3", {"attention_bias": True}, "attention_bias=true"),
        ("llama", {"mlp_bias": True}, "mlp_bias=true"),
        ("qwen2", {"use_sliding_window": True}, "sliding-window"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type=dynamic"),
    ],
)
def test_an_unsupported_config_is_refused(
    family: str, change: dict[str, Any], message: str, checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    fields = json.loads((checkpoints(family, tied=True) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, **change}))
    with pytest.raises(UserError, match=message) as refusal:
        read_config(str(tmp_path))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/nowhere/at/all", "is not a folder"),
        ("./missing", "is not a folder"),
        ("three/part/name", "is not a folder"),
        ("no-such-org/no-such-model", "could not be fetched from the hub .* actor.path=DIR"),
    ],
)
def test_a_model_that_is_nowhere_is_refused(path: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=message):
        local_folder(path)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no config\.json"):
        read_config(str(tmp_path))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tp_size": 3}, "tp_size=3 does not divide the model's num_attention_heads=4"),
        ({"tp_size": 4}, "tp_size=4 does not divide the model's num_key_value_heads=2"),
        ({"pp_size": 3}, "pp_size=3 does not divide the model's 2 layers"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused(
    layout: dict[str, int], message: str, checkpoints: Callable[..., Path]
) -> None:
    config = read_config(str(checkpoints("qwen3", tied=True)))
    with pytest.raises(UserError, match=message):
        check_layout(config, ParallelConfig(**layout))


@pytest.mark.parametrize(("world", "fits"), [("4", True), ("6", False), ("2", False)])
def test_a_world_that_the_layout_does_not_make_is_refused(world: str, fits: bool, monkeypatch: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    parallel = ParallelConfig(tp_size=2, pp_size=2)
    if fits:
        assert parallel.world_size() == 4
    else:
        with pytest.raises(UserError, match=f"the world has {world} ranks"):
            parallel.world_size()


@pytest.mark.parametrize(("size", "tp", "padded"), [(343, 1, 344), (344, 1, 344), (343, 2, 352), (352, 2, 352)])
def test_a_vocabulary_is_padded_to_whole_shards(
    size: int, tp: int, padded: int, checkpoints: Callable[..., Path]
) -> None:
    config = read_config(str(checkpoints("qwen3", tied=True)))
    config.vocab_size = size
    assert padded_vocab_size(config, tp) == padded
