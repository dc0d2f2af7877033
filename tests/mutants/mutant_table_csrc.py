"""Bugs written by hand in the headers that CPU and CUDA kernels share. `_C` is compiled for each."""

from __future__ import annotations

from mutant import Bugs

LOSS = ("tests/kernels/test_policy_loss.py",)
ADVANTAGES = ("tests/kernels/test_advantages.py",)
ROWS = ("tests/kernels/test_logprob_values.py",)

HEADERS: Bugs = {
    "csrc/quantize/e4m3.h": {
        ("tests/kernels/test_quantize.py",): [
            ("ties go up", "(dropped == half && (kept & 1u))", "dropped == half"),
            ("the least numbers are 0", "if (shift > 24u)", "if (shift > 23u)"),
            (
                "blocks are numbered by columns",
                "row = index / across * a.block_rows;",
                "row = index % across * a.block_rows;",
            ),
            ("a scale makes the largest 240", "kLargestE4M3 = 448.0f", "kLargestE4M3 = 240.0f"),
        ],
    },
    "csrc/loss/policy_loss_math.h": {
        LOSS: [
            ("k2's slope has the other sign", "*slope = -r;", "*slope = r;"),
            ("k3's slope goes on beyond the limit", "within(r) ? -excess : T(0)", "-excess"),
            ("the limit of log-ratios is 21", "kLogRatioLimit = 20", "kLogRatioLimit = 21"),
            ("the clip takes the smaller loss", "cut = clip_loss > free_loss;", "cut = clip_loss < free_loss;"),
            ("dual_clip bounds positive advantages too", "s.dual_clip > 0 && advantage < 0 &&", "s.dual_clip > 0 &&"),
            ("dual_clip leaves a gradient", "if (!cut && !dual && within(raw))", "if (!cut && within(raw))"),
            ("truncate is ignored", "      if (above) weight = s.correction_high;\n", ""),
            ("mask keeps small weights", "} else if (above || below) {", "} else if (above) {"),
            ("the correction leaves the gradient alone", "    out.d_ratio *= T(weight);\n", ""),
            ("the entropy is a penalty", "out.loss -= T(s.entropy_coef)", "out.loss += T(s.entropy_coef)"),
            (
                "unclipped ratios count as clipped",
                "sums[kClippedHigh] += cut && ratio > high;",
                "sums[kClippedHigh] += ratio > high;",
            ),
            ("the last part's maximum wins", "into[k] = from[k] > into[k] ? from[k] : into[k];", "into[k] = from[k];"),
        ],
    },
    "csrc/loss/token.h": {
        LOSS: [("a sequence begins a token late", "cu_seqlens[middle] <= t", "cu_seqlens[middle] < t")],
    },
    "csrc/common/advantage_math.h": {
        ADVANTAGES: [
            ("a group of one has an advantage", "if (n < 2) return centred * 0;", "if (n < 1) return centred * 0;"),
            ("eps is ignored", "return centred / (std + eps);", "return centred / std;"),
            ("leave-one-out is the mean", "return centred * n / (n - 1);", "return centred;"),
            ("the merged mean leans to the first", "a.mean + delta * (b.n / n)", "a.mean + delta * (a.n / n)"),
            ("the merged variance lacks the distance", " + delta * delta * (a.n * b.n / n)", ""),
            ("two elements have no variance", "m.n > 1 ? m.m2", "m.n > 2 ? m.m2"),
            ("the variance is biased", "m.m2 / (m.n - 1)", "m.m2 / m.n"),
            ("the clip is one-sided", "y > clip ? clip : y < -clip ? -clip : y", "y > clip ? clip : y"),
            ("lambda is ignored", "return {gamma * lambda, gamma,", "return {gamma, gamma,"),
        ],
        ("tests/gpu/test_kernels_on_device.py::test_gae_moments_and_whitening_match_the_cpu",): [
            ("composed maps forget a masked token's value", "(later.sets_value ? 0 : earlier.q)", "0"),
            ("composed maps take the later value", "earlier.sets_value ? earlier.value : later.value", "later.value"),
        ],
    },
    "csrc/common/row_math.h": {
        ROWS: [
            (
                "an infinite logit spoils the entropy",
                "  if (factor == A(0)) return {top, s.sum * factor, s.dot * factor};  // avoids 0 * -inf\n",
                "",
            ),
            ("the entropy has the other sign", "log_sum - s.dot / s.sum", "log_sum + s.dot / s.sum"),
            (
                "the entropy's gradient has the other sign",
                "(g + h * entropy) * inv_temp",
                "(g - h * entropy) * inv_temp",
            ),
            ("the label's gradient ignores the temperature", "          g * inv_temp};", "          g};"),
        ],
    },
}
