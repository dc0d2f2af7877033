"""Bugs written by hand in the LM head's chunks: gradients that are told, and columns that are left out."""

from __future__ import annotations

from mutant import Bugs, unit

HEAD: Bugs = {
    "megarl/actor/token_loss.py": {
        unit("actor/test_token_loss"): [
            ("the microbatch's weight is missing", ") * mb.weight", ")"),
        ],
        ("tests/distributed/test_overlap.py",): [
            ("rows are taken for positions", "rows if mb.local is None else mb.local.source[rows]", "rows"),
        ],
    },
    "megarl/actor/mtp.py": {
        unit("actor/test_mtp"): [
            ("the head is told of one depth", "self.factor) / self.depths", "self.factor)"),
            (
                "logits of later tokens are computed twice",
                "            functools.partial(self._gradients, depth),\n",
                "",
            ),
        ],
    },
    "megarl/actor/policy.py": {
        unit("actor/test_token_loss"): [
            ("every algorithm is taken for one by token", "and self.algorithm.by_token(given_prox_logp)", "and True"),
        ],
        unit("actor/test_policy"): [
            (
                "each chunk adds to the proximal log-probs",
                "self._loss_input(own_loss, given_prox_logp=False)",
                "self._loss_input(loss, given_prox_logp=False)",
            ),
        ],
    },
    "megarl/algorithms/policy_gradient.py": {
        unit("actor/test_token_loss"): [
            (
                "rejected sequences count by token",
                "given_prox_logp or not (rejects or",
                "given_prox_logp or not (False or",
            ),
            ("a sequence's ratio counts by token", "not (given_prox_logp or rejects or", "not (rejects or"),
        ],
    },
    "megarl/ops/known_gradients.py": {
        unit("actor/test_token_loss"): [
            (
                "the entropy's gradient is left out",
                "losses[0] if len(losses) == 1 else losses[0] + losses[1]",
                "losses[0]",
            ),
            ("a rank without a label has no gradient", "if torch.is_grad_enabled():", "if told:"),
            ("other gradients pass", "difference > DIFFERENCE * largest", "difference > 1e9 * largest"),
            (
                "a loss that is not finite stops the run",
                "difference > DIFFERENCE * largest",
                "~(difference <= DIFFERENCE * largest)",
            ),
        ],
    },
    "megarl/ops/skipped_columns.py": {
        ("tests/kernels/test_skipped_columns.py",): [
            ("the share is not squared", "ROUNDING * share**2", "ROUNDING * share"),
            (
                "a row's size is no matter",
                "torch.where(total == 0, 0.0, total / squares)",
                "torch.where(total == 0, 0.0, 1.0)",
            ),
            (
                "rows without a gradient ask for all",
                "torch.where(total == 0, 0.0, total / squares)",
                "(total / squares)",
            ),
            ("a row whose squares vanish asks for none", "where(total == 0,", "where(squares == 0,"),
            (
                "the first column of a part is forgotten",
                "gradient.split(COLUMNS, 1)",
                "gradient[:, 1:].split(COLUMNS, 1)",
            ),
        ],
        ("tests/kernels/test_groups.py",): [
            ("each rank goes by its own part", "if group is not None:", "if False:"),
        ],
    },
    "megarl/ops/linear_logprob.py": {
        ("tests/kernels/test_skipped_columns.py",): [
            ("other weights are multiplied", "weight.index_select(0, columns)", "weight[: len(columns)]"),
            (
                "columns are added to the first rows",
                "self.weight.index_add_(0, columns,",
                "self.weight[: len(columns)].add_(",
            ),
        ],
    },
}
