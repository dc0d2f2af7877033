"""A comparison names the token, position and layer of a planted difference; its page shows any text as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.actor.layer_states import EXPERTS, HIDDEN, ROWS, layer_states
from megarl.actor.policy import MegatronPPOActor
from megarl.compare import parse
from megarl.knobs import UserError
from megarl.observe.compare_page import draw_panels, write_compare_page
from megarl.parallel import groups
from megarl.preflight.invariance import CASES, MODELS, batch, build_actor, write_models
from megarl.trainer.replay.compared_side import LOGPROBS
from megarl.trainer.replay.drift import drift_of
from megarl.trainer.replay.drift_report import report


class Words:
    """A tokenizer whose every token is a tag."""

    def decode(self, ids: list[int]) -> str:
        return f"<script>{ids[0]}"


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MegatronPPOActor]:
    work = tmp_path_factory.mktemp("models")
    write_models(work, {"moe": MODELS["moe"]})
    actor = build_actor(replace(CASES["moe tp1"], max_tokens_per_mb=60), work / "moe")
    yield actor
    groups.destroy()


def states_of(actor: MegatronPPOActor) -> dict[str, Any]:
    data = batch()
    states = layer_states(actor, data)
    rows = states.pop(ROWS)
    assert sorted(rows.tolist()) == list(range(data.total_tokens))
    ordered = {key: values[rows.argsort()] for key, values in states.items()}
    return {**ordered, LOGPROBS: actor.logprobs(data)}


def test_every_layer_and_router_is_recorded_for_every_token(actor: MegatronPPOActor) -> None:
    states = states_of(actor)
    assert {key for key in states if key.startswith(HIDDEN)} == {f"{HIDDEN}{n:03d}" for n in range(5)}
    assert {key for key in states if key.startswith(EXPERTS)} == {f"{EXPERTS}{n:03d}" for n in (2, 3, 4)}
    ids, embedding = batch()["input_ids"], actor.stages[0].embedding.word_embeddings.weight.detach()
    assert torch.equal(states[f"{HIDDEN}000"], embedding[ids])
    assert bool((states[f"{EXPERTS}003"].sum(1) == 2).all())
    assert states[f"{HIDDEN}004"].norm(dim=1).min() > 0


def test_a_changed_layer_is_where_the_sides_part(actor: MegatronPPOActor) -> None:
    one = states_of(actor)
    weight = actor.stages[0].decoder.layers[2].self_attention.linear_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(1.5)
    other = states_of(actor)
    with torch.no_grad():
        weight.copy_(kept)
    data = batch()
    drift = drift_of(data, one, other, data["loss_mask"])
    assert [layer.largest > 0 for layer in drift.layers] == [False, False, False, True, True]
    assert drift.parting is not None
    assert drift.parting.layer == 3
    assert drift.layers[2].same_experts == 1
    same = [layer.same_experts for layer in drift.layers[3:]]
    assert all(share is not None and 0 < share < 1 for share in same), "other hidden states choose other experts"
    shown = report(drift, data, Words(), is_server=False)
    assert [row[-1] for row in shown.tables[0][1][:4]] == ["same experts", "-", "-", "100.00%"]
    dense = replace(drift, layers=[replace(layer, same_experts=None) for layer in drift.layers])
    assert "same experts" not in report(dense, data, Words(), is_server=False).tables[0][1][0]
    lines = shown.lines
    assert any("they part at layer 3" in line for line in lines)
    assert any(line.startswith("experts   2 layers choose others") for line in lines)


def test_a_tokens_gap_is_found_at_its_sequence_and_position() -> None:
    data = batch()
    one = {LOGPROBS: -torch.rand(data.total_tokens)}
    other = {LOGPROBS: one[LOGPROBS].clone()}
    place = data.bounds[4] + 30  # of the longest sequence
    other[LOGPROBS][place] += 0.25
    drift = drift_of(data, one, other, data["loss_mask"])
    worst = drift.worst[0]
    assert (worst.sequence, worst.position, worst.token) == (4, 30, int(data["input_ids"][place]))
    assert worst.gap == pytest.approx(0.25, abs=1e-6)
    assert drift.equal == drift.tokens - 1 == int(data["loss_mask"].sum()) - 1
    (found,) = [part for part in drift.positions if part.largest]
    assert found.first <= 30 <= found.last
    assert sum(part.tokens for part in drift.positions) == drift.tokens
    shown = report(drift, data, Words(), is_server=True)
    assert [row[0] for row in shown.panels[0][3]] == [(part.first + part.last) / 2 for part in drift.positions]
    lines = shown.lines
    assert "a server tells log-probs over HTTP, and no hidden states" in lines[1]


def test_a_layers_error_is_relative_to_the_first_sides_state() -> None:
    data = batch()
    logprobs, hidden = torch.zeros(data.total_tokens), torch.tensor([[30.0, 40.0]]).repeat(data.total_tokens, 1)
    one = {LOGPROBS: logprobs, f"{HIDDEN}001": hidden}
    other = {LOGPROBS: logprobs, f"{HIDDEN}001": hidden * torch.tensor([1.0, 1.125])}
    (layer,) = drift_of(data, one, other, data["loss_mask"]).layers
    assert layer.median == layer.largest == pytest.approx(0.1)


def test_the_page_shows_texts_as_text_and_loads_nothing(tmp_path: Path) -> None:
    data = batch()
    one = {LOGPROBS: torch.zeros(data.total_tokens)}
    shown = report(drift_of(data, one, one, data["loss_mask"]), data, Words(), is_server=True)
    pictures = draw_panels(shown.panels, tmp_path / "compare.png")
    page = tmp_path / "compare.html"
    write_compare_page(page, "<script>title", shown.lines, pictures, shown.tables)
    text = page.read_text("utf-8")
    assert "<script" not in text
    assert "&lt;script&gt;title" in text
    assert "http" not in text.replace("over HTTP", "").split("</style>")[1]
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_a_second_comparison_leaves_the_first_ones_page(tmp_path: Path) -> None:
    words = [str(tmp_path), "step=3"]
    for name in ("compare_000003", "compare_000003_2", "compare_000003_3"):
        assert parse(words).output == tmp_path / name
        parse(words).output.mkdir()
    assert parse([*words, f"output={tmp_path / 'compare_000003'}"]).output == tmp_path / "compare_000003"


def test_the_command_line_is_checked() -> None:
    assert parse(["run", "step=3"]).against == "server"
    assert parse(["run", "step=3", "parallel=tp2"]).against == ""
    for words in ([], ["step=1"], ["run"], ["run", "step=0"], ["run", "step=1", "sequences=0"]):
        with pytest.raises(UserError, match="usage: python -m megarl"):
            parse(words)
    with pytest.raises(UserError, match=r"^parallel=tp2: against=server compares the run's own actor"):
        parse(["run", "step=1", "against=server", "parallel=tp2"])
