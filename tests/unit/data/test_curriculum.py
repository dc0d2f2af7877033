"""The curriculum leaves out prompts by their measured pass rates, brings them back, and resumes bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.data.collate import Batches
from megarl.data.config import CurriculumConfig, DatasetConfig
from megarl.data.curriculum import Curriculum
from megarl.data.mixture import Mixture, Origins
from megarl.knobs import UserError
from megarl.observe.metrics import stats_tracker
from megarl.trainer.checkpoints import trainer_state
from megarl.types import ORIGIN, TEACHER_SAMPLED, Episode, PackedBatch, cu_seqlens_of

SIZE = 24


def curriculum(skip: str = "both", size: int = SIZE, data: Any = None, **knobs: Any) -> Curriculum:
    origins = Origins(data if data is not None else [{"i": i} for i in range(size)])
    batches = Batches(origins, DatasetConfig(batch_size=6, seed=3))
    return Curriculum(CurriculumConfig(skip=skip, **knobs), batches, origins.distinct, 1.0)


def episode(row: dict[str, Any], rewards: list[float], refused: bool = False) -> Episode:
    if refused:
        return Episode("0", None, "refused", origin=row[ORIGIN], rewards=tuple(rewards))
    group = PackedBatch(
        cu_seqlens_of(torch.ones(len(rewards))),
        {"loss_mask": torch.ones(len(rewards), dtype=torch.bool)},
        {"rewards": torch.tensor(rewards)},
    )
    return Episode("0", group, origin=row[ORIGIN])


def rewards_of(row: dict[str, Any]) -> list[float]:
    """Prompts divisible by 3 are solved, those with remainder 1 hopeless, the others in between."""
    return {0: [1.0] * 4, 1: [0.0] * 4, 2: [1.0, 0.0, 0.0, 1.0]}[row["i"] % 3]


def epochs(prompts: Curriculum, count: int) -> list[list[int]]:
    """Rows asked in each of the next epochs, by the epoch that they were read in."""
    asked: list[list[int]] = [[] for _ in range(count)]
    while prompts.batches.epoch < count:
        rows = next(prompts)
        for row in rows:
            if (epoch := row[ORIGIN]["epoch"]) < count:
                asked[epoch].append(row["i"])
        prompts.observe([episode(row, rewards_of(row), refused=row["i"] % 2 == 0) for row in rows])
    return asked


@pytest.mark.parametrize(("skip", "left"), [("solved", {1, 2}), ("hopeless", {0, 2}), ("both", {2})])
def test_prompts_are_left_out_for_the_epochs_of_the_knob_and_return(skip: str, left: set[int]) -> None:
    asked = epochs(curriculum(skip, revisit_epochs=2), 5)
    everyone = list(range(SIZE))
    kept = [i for i in everyone if i % 3 in left]
    assert [sorted(rows) for rows in asked] == [everyone, kept, kept, everyone, kept]


def test_patience_counts_measurements_in_a_row_of_one_kind() -> None:
    prompts = curriculum(patience=2, revisit_epochs=5)
    row = {"i": 0, ORIGIN: {"source": "", "row": 7, "epoch": 0}}
    for rewards, streak in (
        *(([1.0], 1), ([0.0], -1), ([1.0, 0.0], 0), ([0.0], -1), ([0.0, 0.0], -2)),
        *(([1.0], 1), ([1.0], 2), ([0.0], -1)),
    ):
        prompts.observe([episode(row, rewards)])
        assert int(prompts.streak[7]) == streak
        assert prompts.is_left_out(7, 1) == (abs(streak) == 2)
    assert float(prompts.rate[7]) == 0.0


def test_rates_below_the_knobs_count_as_solved_and_hopeless() -> None:
    prompts = curriculum(solved_rate=0.75, hopeless_rate=0.25)
    for number, (rewards, streak) in enumerate([([1, 1, 1, 0], 1), ([1, 0, 0, 0], -1), ([1, 1, 0, 0], 0)]):
        prompts.observe([episode({ORIGIN: {"source": "", "row": number, "epoch": 0}}, [float(r) for r in rewards])])
        assert int(prompts.streak[number]) == streak


def test_the_teachers_samples_measure_no_prompt() -> None:
    prompts = curriculum()
    mixed = episode({ORIGIN: {"source": "", "row": 3, "epoch": 0}}, [1.0, 0.0, 0.0, 0.0])
    assert mixed.group is not None
    mixed.group.set_sequences(TEACHER_SAMPLED, torch.tensor([True, False, False, False]))
    prompts.observe([mixed])
    assert (float(prompts.rate[3]), int(prompts.streak[3])) == (0.0, -1)
    alone = episode({ORIGIN: {"source": "", "row": 4, "epoch": 0}}, [1.0])
    assert alone.group is not None
    alone.group.set_sequences(TEACHER_SAMPLED, torch.tensor([True]))
    prompts.observe([alone])
    assert int(prompts.epoch[4]) == -1  # never measured


def test_a_run_with_every_prompt_solved_asks_all_of_them_again(caplog: pytest.LogCaptureFixture) -> None:
    prompts = curriculum(size=6, revisit_epochs=10**9)
    for _ in range(3):
        rows = next(prompts)
        assert len(rows) == 6
        prompts.observe([episode(row, [1.0]) for row in rows])
    assert "all 6 prompts were solved or hopeless when last measured: all return" in caplog.text


def test_the_order_after_a_resume_is_bit_for_bit_the_unbroken_one(tmp_path: Path) -> None:
    def run(prompts: Curriculum, steps: int) -> list[list[dict[str, Any]]]:
        batches = []
        for _ in range(steps):
            batches.append(rows := next(prompts))
            prompts.observe([episode(row, rewards_of(row), refused=row["i"] % 2 == 0) for row in rows])
        return batches

    unbroken = curriculum(revisit_epochs=1)
    expected = run(unbroken, 30)
    for taken in (1, 5, 11, 17):
        first, resumed = (curriculum(revisit_epochs=1) for _ in range(2))
        run(first, taken)
        trainer_state.write(tmp_path, *trainer_state.freeze({"loader": first.state_dict()}))
        resumed.load_state_dict(trainer_state.read(tmp_path)["loader"])
        assert run(resumed, 30 - taken) == expected[taken:]
        for name in ("rate", "epoch", "streak"):
            assert torch.equal(getattr(resumed, name), getattr(unbroken, name))


def test_the_share_of_skipped_prompts_is_recorded() -> None:
    prompts = curriculum(revisit_epochs=1)
    epochs(prompts, 1)
    stats_tracker.export()
    rows = next(prompts)
    resumed = curriculum(revisit_epochs=1)
    resumed.load_state_dict(prompts.state_dict())
    for taken in (prompts, resumed):
        taken.observe([])
        stats = stats_tracker.export()
        assert stats["data/skipped_share"] == pytest.approx(1 - len(rows) / 6)
    assert stats["data/solved_share"] == pytest.approx(1 / 3)
    assert stats["data/hopeless_share"] == pytest.approx(1 / 3)
    assert stats["data/measured_share"] == 1


def test_repeated_rows_of_a_mixture_share_one_measurement() -> None:
    parts = [[{"i": 0}], [{"i": k} for k in range(1, 7)]]
    prompts = curriculum("solved", data=Mixture(parts, [1, 1], ["a", "b"]), revisit_epochs=5)
    assert len(prompts.rate) == 7
    assert prompts.rows == 12
    asked = epochs(prompts, 2)
    assert asked[1].count(0) == asked[1].count(3) == 0
    assert set(asked[1]) == {1, 2, 4, 5}
    stats_tracker.export()
    rows = next(prompts)
    prompts.observe([episode(row, rewards_of(row)) for row in rows])
    assert stats_tracker.export()["data/b/share"] == sum(row[ORIGIN]["source"] == "b" for row in rows) / len(rows)


def test_checkpoints_without_a_curriculum_or_of_other_data_are_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    prompts = curriculum()
    prompts.load_state_dict(prompts.batches.state_dict())
    assert "holds no measured pass rates" in caplog.text
    state = prompts.state_dict()
    prompts.batches.load_state_dict(state)  # a run that goes on without its curriculum
    state["curriculum"]["rate"] = torch.zeros(3)
    with pytest.raises(UserError, match="has measurements of 3 prompts, the data now has 24"):
        prompts.load_state_dict(state)


def test_a_prompt_cannot_be_solved_and_hopeless() -> None:
    with pytest.raises(UserError, match=r"curriculum.hopeless_rate=0.5 must be below curriculum.solved_rate=0.5"):
        CurriculumConfig(solved_rate=0.5, hopeless_rate=0.5)
