"""Any layout loads any other layout's state bit for bit, with main parameters and Adam's moments, and trains on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from megarl.actor.checkpoint.stored_state import StoredState
from megarl.launcher.local import run_ranks
from megarl.parallel import groups
from tests import rows
from tests.distributed.checkpoint_worker import DENSE, MOE, STEPS, engine_of, poison, train

pytestmark = rows.marks()
KINDS = {"float32": ("weight", "exp_avg", "exp_avg_sq"), "bfloat16": ("weight", "main", "exp_avg", "exp_avg_sq")}
CASES: dict[str, dict[str, Any]] = rows.only("untied_bfloat16,critic,experts", {
    "tied": {
        "family": "qwen3", "tied": True, "vocab_size": 341,
        "layouts": rows.only("pp2vpp2dp2,tp2cp2", DENSE),
    },
    "untied_bfloat16": {
        "family": "llama", "tied": False, "vocab_size": 347, "dtype": "bfloat16",
        "layouts": rows.only("pp2vpp2dp2,tp2sp", {k: DENSE[k] for k in ("tp2dp2", "pp2vpp2dp2", "pp2uneven", "tp2sp")}),
    },
    "critic": {
        "family": "qwen2", "tied": True, "scalar": True,
        "layouts": rows.only("tp2cp2", {k: DENSE[k] for k in ("tp2cp2", "pp2uneven")}),
    },
    "experts": {"layouts": rows.only("tp2ep2etp1,ep2grouped", MOE)},
    "latent_bfloat16": {  # with a float32 buffer
        "family": "deepseek_v3", "tied": False, "dtype": "bfloat16",
        "layouts": {k: MOE[k] for k in ("tp2ep2etp1", "pp2ep2")},
    },
    "experts_bfloat16": {
        "dtype": "bfloat16",
        "layouts": {k: MOE[k] for k in ("tp2ep2etp1", "tp2ep2grouped")},
    },
})  # fmt: skip


def moe_model(folder: Path) -> Path:
    config = Qwen3MoeConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=343,
        intermediate_size=96, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1,
        norm_topk_prob=True, tie_word_embeddings=False, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def work(checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder with the states of one process and of four ranks in every layout, and the problems that they found."""
    work = tmp_path_factory.mktemp("states")
    cases = {}
    for name, fields in CASES.items():
        fields = dict(fields)
        options = {"layouts": fields.pop("layouts"), "dtype": fields.pop("dtype", "float32")}
        options["scalar"] = fields.pop("scalar", False)
        options["tolerance"] = 1e-4 if options["dtype"] == "float32" else 0.05
        (work / name).mkdir()
        model = checkpoints(**fields, num_hidden_layers=4) if fields else moe_model(work / f"{name}_model")
        (work / name / "model").symlink_to(model)
        engine = engine_of(work / name / "model", options["dtype"], options["scalar"], {})
        train(engine, options["scalar"])
        engine.save_state(work / name / "single")
        cases[name] = {**options, "losses": train(engine, options["scalar"])}
    (work / "cases.json").write_text(json.dumps(cases))
    groups.destroy()
    logs = tmp_path_factory.mktemp("logs")
    code = run_ranks("tests.distributed.checkpoint_worker", [str(work)], 4, logs)
    assert code == 0, "\n".join(p.read_text()[-2000:] for p in logs.iterdir())
    yield work
    groups.destroy()


def test_every_layout_has_every_other_layouts_bits_and_trains_on_like_one_process(work: Path) -> None:
    assert [json.loads((work / f"wrong-{rank}.json").read_text()) for rank in range(4)] == [[]] * 4


@pytest.mark.parametrize("name", CASES)
def test_what_every_layout_wrote_is_what_one_process_wrote(name: str, work: Path) -> None:
    single = StoredState(work / name / "single")
    assert single.facts["adam_steps"] == STEPS
    for layout in CASES[name]["layouts"]:
        other = StoredState(work / name / layout)
        assert other.shapes == single.shapes
        assert {**other.facts, "layout": None} == {**single.facts, "layout": None}
        for tensor, shape in single.shapes.items():
            assert single.kinds[tensor] == ("buffer" if tensor.endswith("correction_bias") else "weight")
            for kind in KINDS[single.facts["dtype"]] if single.kinds[tensor] == "weight" else ("buffer",):
                pair = [state.read(kind, tensor, (0,) * len(shape), shape) for state in (single, other)]
                assert torch.equal(*pair), f"{layout}: {kind} of {tensor}"


@pytest.mark.parametrize("name", CASES)
def test_one_process_trains_on_from_any_layout_to_the_same_bits(name: str, work: Path) -> None:
    case = json.loads((work / "cases.json").read_text())[name]
    engine = engine_of(work / name / "model", case["dtype"], case["scalar"], {})
    engine.load_state(work / name / "single")  # creates the moments
    for layout in case["layouts"]:
        poison(engine)
        engine.load_state(work / name / layout)
        assert train(engine, case["scalar"]) == case["losses"], layout
