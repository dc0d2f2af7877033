"""Table of model families: each against transformers and SGLang, on random float32 models of four layers.

    python benchmarks/family_table.py [--families NAME ...] [--no-runs] [--page docs/families.md]

Cells of layouts hold the worst absolute difference of a token's log-prob from transformers, in brackets after an
optimizer step; `page` replaces the table between its marks. About a minute a family on two cores, and one more for the
run with servers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from megarl.actor.checks import check_layout  # noqa: E402
from megarl.actor.config import EngineConfig, OptimizerConfig  # noqa: E402
from megarl.actor.engine import MegatronEngine  # noqa: E402
from megarl.families import FAMILIES, decoder, read_config  # noqa: E402
from megarl.knobs import UserError  # noqa: E402
from megarl.launcher.local import run_ranks  # noqa: E402
from megarl.parallel import groups  # noqa: E402
from megarl.parallel.config import ParallelConfig  # noqa: E402
from megarl.types import PackedBatch  # noqa: E402
from tests.conftest import FAMILY_CONFIGS, random_model, save_model  # noqa: E402
from tests.distributed.layout_worker import ADAM, loss_fn, loss_weight_fn  # noqa: E402
from tests.distributed.test_layouts import make_batch, reference_logprobs  # noqa: E402
from tests.sglang.test_sglang_geometry import ranks_of  # noqa: E402

WORKER = "benchmarks.family_table"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp1": {},
    "tp2": {"tp_size": 2, "sequence_parallel": True},
    "pp2": {"pp_size": 2},
    "cp2": {"cp_size": 2},
    "ep2": {"dp_size": 2, "ep_size": 2},
}
# Windows are shorter than the sequences. A padding token has no gradient in transformers. SGLang reads the last two.
FIELDS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "pad_token_id": None,
    },
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "gpt_oss": {"sliding_window": 9},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"] * 2, "full_attention_interval": 2},
}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
RUN = (
    "total_train_steps=10", "train_dataset.batch_size=4", "gconfig.n_samples=4", "gconfig.max_new_tokens=24",
    "algorithm.n_minibatches=1", "evaluator.every_steps=0", "saver.every_steps=0",
)  # fmt: skip
RUN_LIMIT_S = 1200.0


def parallel_of(folder: Path, layout: str) -> ParallelConfig:
    """The layout's knobs; experts are never cut, which gpt-oss refuses."""
    experts = decoder(read_config(str(folder / "model"))).experts
    return ParallelConfig(**LAYOUTS[layout], **({"etp_size": 1} if experts is not None else {}))


def measure(folder: Path, parallel: ParallelConfig, layout: str) -> None:
    """Computes log-probs before and after a step, as one rank of a layout; tp1 also writes the loaded model back."""
    stored = load_file(folder / "batch.safetensors")
    batch = PackedBatch(stored.pop("cu_seqlens"), stored)
    optimizer = OptimizerConfig(**ADAM, clip_grad=1.0)
    engine = MegatronEngine(
        EngineConfig(path=str(folder / "model"), max_tokens_per_mb=60, optimizer=optimizer), parallel
    )
    engine.initialize()
    result = {"before": engine.eval().logprobs(batch)}
    if layout == "tp1":
        engine.save(folder / "exported")
    engine.train()
    engine.train_batch(batch, loss_fn, loss_weight_fn, loss_input="logprobs")
    result["after"] = engine.eval().logprobs(batch)
    if engine.groups.rank == 0:
        save_file(result, folder / f"{layout}.safetensors")
    groups.leave_layout()


def prepare(family: str, folder: Path) -> dict[str, torch.Tensor]:
    """Writes a random model and a batch. Returns the log-probs of transformers before and after the step."""
    vocab = json.loads((ROOT / "assets/tiny/config.json").read_text())["vocab_size"]
    tied = bool(FAMILIES[family].fields.get("tie_word_embeddings"))
    model = random_model(family, tied=tied, vocab_size=vocab, num_hidden_layers=4, **FIELDS.get(family, {}))
    save_model(family, model, folder / "model")
    for name in TOKENIZER:
        shutil.copy(ROOT / "assets/tiny" / name, folder / "model" / name)
    batch = make_batch(vocab)
    save_file(batch, folder / "batch.safetensors")
    optimizer = torch.optim.AdamW(model.parameters(), lr=ADAM["lr"], eps=ADAM["adam_eps"], weight_decay=0.0)
    logprobs, entropy = reference_logprobs(model, batch)
    packed = PackedBatch(batch["cu_seqlens"], {k: v for k, v in batch.items() if k != "cu_seqlens"})
    loss_fn(logprobs, entropy, packed)[0].backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    with torch.no_grad():
        return {"before": logprobs.detach(), "after": reference_logprobs(model, batch)[0]}


def layout_cells(folder: Path, expected: dict[str, torch.Tensor]) -> list[str]:
    """Worst difference by layout; `-` where the model has no experts to lay out, or the reason of a refusal."""
    config, cells = read_config(str(folder / "model")), dict.fromkeys(LAYOUTS, "fails")
    worlds: dict[int, list[str]] = {}
    for layout in LAYOUTS:
        parallel = parallel_of(folder, layout)
        try:
            check_layout(config, parallel)
            worlds.setdefault(parallel.world_size(), []).append(layout)
        except UserError as error:
            cells[layout] = "-" if "has none" in str(error) else "refused"
    for size, layouts in worlds.items():
        logs = Path(tempfile.mkdtemp(dir=folder))
        if run_ranks(WORKER, ["--worker", str(folder), "--layouts", *layouts], size, logs):
            print("\n".join(path.read_text()[-1000:] for path in logs.iterdir()), file=sys.stderr)
        for layout in layouts:
            if (file := folder / f"{layout}.safetensors").exists():
                computed = load_file(file)
                before, after = (float((computed[k] - expected[k]).abs().max()) for k in ("before", "after"))
                cells[layout] = f"{before:.1e} ({after:.1e})"
            elif (refusal := folder / f"{layout}.txt").exists():
                print(f"{layout}: {refusal.read_text()}", file=sys.stderr)
                cells[layout] = "refused"
    return list(cells.values())


def round_trip_cell(folder: Path) -> str:
    """`equal` if every tensor of the checkpoint came back with its name, dtype and bits."""
    stored, exported = ({}, {})
    for tensors, part in ((stored, "model"), (exported, "exported")):
        for file in (folder / part).glob("*.safetensors"):
            tensors.update(load_file(file))
    differ = set(stored) ^ set(exported)
    differ |= {n for n in set(stored) & set(exported) if not torch.equal(stored[n], exported[n])}
    return f"{len(differ)} differ" if differ else "equal"


def server_cell(folder: Path) -> str:
    """`equal` if every parameter that SGLang's loader filled at tp 2 equals the rules, padded as on CPU."""
    try:
        reports = [report for rank in ranks_of([folder / "model"], tp_size=2) for report in rank]
    except AssertionError:
        return "not on CPU"
    wrong = sum(len(r["wrong"]) + len(r["refilled"]) + (r["geometry"] != "equal") for r in reports)
    return f"{wrong} differ" if wrong else "equal"


def run_cell(folder: Path) -> str:
    """Largest difference of a sampled token's log-prob between server and trainer, over ten steps of GRPO."""
    arguments = ["+experiment=gsm8k_grpo", f"actor.path={folder / 'model'}", f"run_root={folder / 'runs'}", *RUN]
    run = subprocess.run(
        [sys.executable, "-m", "megarl.train", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False,
    )  # fmt: skip
    if run.returncode:
        print(run.stdout[-1000:], run.stderr[-1000:], file=sys.stderr)
        return "refused" if run.returncode == 2 else "fails"
    summary = json.loads(next((folder / "runs").glob("*/*/summary.json")).read_text())
    return f"{summary['max_rollout_train_logprob_diff']:.1e}"


def rows(families: list[str], runs: bool) -> list[list[str]]:
    """One row of cells a family."""
    table = []
    for family in families:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            expected = prepare(family, folder)
            layouts = layout_cells(folder, expected)
            cells = [round_trip_cell(folder), *layouts, server_cell(folder), *([run_cell(folder)] if runs else [])]
        table.append([f"`{family}`", *cells])
        print(" | ".join(table[-1]), flush=True)
    return table


def markdown(table: list[list[str]], runs: bool) -> str:
    head = ["`model_type`", "HF round trip", *LAYOUTS, "SGLang's loader, tp 2", *(["10 steps of GRPO"] if runs else [])]
    lines = [head, ["---"] * len(head), *table]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=sorted(FAMILY_CONFIGS), help="model types; all by default")
    parser.add_argument("--no-runs", action="store_true", help="without the runs that start servers")
    parser.add_argument("--page", type=Path, help="page whose table is replaced")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--layouts", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.worker is not None:
        for layout in arguments.layouts:
            try:
                measure(arguments.worker, parallel_of(arguments.worker, layout), layout)
            except UserError as error:
                (arguments.worker / f"{layout}.txt").write_text(str(error))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    table = markdown(rows(arguments.families, not arguments.no_runs), not arguments.no_runs)
    if arguments.page is None:
        print(table)
        return
    text = arguments.page.read_text()
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    arguments.page.write_text(f"{before}\n{table}\n{after}")


if __name__ == "__main__":
    main()
