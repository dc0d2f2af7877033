"""Bugs written by hand in scoring beside a sync (`reshard.overlap_scoring`)."""

from __future__ import annotations

from mutant import Bugs, unit

RUNS = ("tests/e2e/test_scoring_beside_syncs.py",)

OVERLAP: Bugs = {
    "megarl/rollout/bounded_staleness.py": {
        unit("rollout/test_batches_beside_syncs", "rollout/test_bounded_staleness"): [
            ("a prompt starts while the servers are behind", "if not self._is_served:", "if False:"),
            ("a version told twice makes room twice", "if version != self._version:", "if True:"),
        ],
    },
    "megarl/rollout/routing.py": {
        unit("rollout/test_batches_beside_syncs"): [
            (
                "a batch is awaited though its answers are withheld until the sync ends",
                "if self.sync_ended is not None and self.sync_ended():",
                "if False:",
            ),
        ],
    },
    "megarl/trainer/background_call.py": {
        unit("trainer/test_background_call"): [
            ("weights are read before the update is through", "self._stream.wait_stream(torch", "(torch"),
            ("the next update does not wait for the reads", ").wait_stream(self._stream)", ")"),
        ],
    },
    "megarl/trainer/rl.py": {
        RUNS: [
            (
                "the update does not wait for the sync",
                "                rollouts.end_push()  # the update changes them",
                "                pass",
            ),
        ],
    },
    "megarl/trainer/rollouts/rollout_driver.py": {
        RUNS: [
            (
                "an evaluation is of the old weights",
                'raise WeightsWanted("the evaluation is of the new weights")',
                "pass",
            ),
            (
                "a batch is taken at the old version",
                "self.rank0.engine.expect_version(served, self.weights.has_transferred)",
                "pass",
            ),
        ],
    },
}
