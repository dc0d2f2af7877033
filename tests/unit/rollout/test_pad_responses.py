import pytest
import torch

from megarl.rollout.transcript import pad_responses
from megarl.types import ModelResponse, PackedBatch


def test_responses_of_different_lengths_are_padded_on_the_right_and_masked():
    long = ModelResponse([5, 6], [7, 8, 9], [-0.5, -0.25, -1.0], [3, 3, 4])
    short = ModelResponse([5, 6], [0], [-2.0], [4])
    padded = pad_responses([long, short], [1, 0.5])
    assert padded["input_ids"].tolist() == [[5, 6, 7, 8, 9], [5, 6, 0, 0, 0]]
    assert padded["attention_mask"].sum(-1).tolist() == [5, 3]
    assert padded["loss_mask"].tolist() == [[0, 0, 1, 1, 1], [0, 0, 1, 0, 0]]
    assert padded["rollout_logprobs"].tolist() == [[0, 0, -0.5, -0.25, -1.0], [0, 0, -2.0, 0, 0]]
    assert padded["versions"].tolist() == [[-1, -1, 3, 3, 4], [-1, -1, 4, -1, -1]]
    assert padded["rewards"].tolist() == [1.0, 0.5]
    assert padded["rewards"].dtype == torch.float32


def test_padded_responses_pack_to_their_own_tokens():
    responses = [ModelResponse([1] * n, [2] * (5 - n), [-1.0] * (5 - n), [0] * (5 - n)) for n in (1, 2, 3)]
    batch = PackedBatch.from_padded(pad_responses(responses, [0, 1, 2]))
    assert batch.total_tokens == 15
    assert batch["loss_mask"].sum() == 4 + 3 + 2
    assert batch.sequences["rewards"].tolist() == [0, 1, 2]


def test_a_missing_reward_is_refused():
    with pytest.raises(ValueError, match="1 responses need as many rewards, got 0"):
        pad_responses([ModelResponse([1], [2], [-1.0], [0])], [])
