"""Shows where two computations of a batch part: `python -m megarl.compare RUN step=N [against=...] [KNOB=VALUE ...]`.

    against=server          a server on the same weights, by token and position (the default without other knobs)
    against=MODEL           other weights: a HF checkpoint, or a checkpoint of megarl
    parallel.tp_size=2 ...  the same weights on another layout, in another dtype, by another backend

One side is always the actor as the run had it before step N, on the kept batch of step N.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from transformers import AutoTokenizer

from megarl import cli
from megarl.actor.checkpoint.stored_state import FACTS
from megarl.actor.trait_checks import trained_model
from megarl.algorithms import RewardModelConfig
from megarl.checks import machine_checks, server_checks, size_checks
from megarl.config import Config, server_arguments
from megarl.families import read_config
from megarl.hub import local_folder
from megarl.knobs import UserError, run_all
from megarl.launcher.local import PARENT, run_ranks
from megarl.launcher.replay_ranks import take_steps
from megarl.observe.compare_page import draw_panels, write_compare_page
from megarl.observe.run_folder import RunFolder
from megarl.processes import die_with_parent
from megarl.rollout.client.scoring import Scorer
from megarl.rollout.servers.sglang_server import SGLangServers
from megarl.trainer.checkpoints import manifest
from megarl.trainer.checkpoints.manifest import Damaged
from megarl.trainer.checkpoints.saver import ACTOR
from megarl.trainer.replay.checks import changed_knobs, overrides_of
from megarl.trainer.replay.kept_batches import read_batch
from megarl.trainer.replay.order import Order
from megarl.trainer.replay.source import Source, find
from megarl.types import PackedBatch

USAGE = "usage: python -m megarl.compare RUN step=N [against=server|MODEL] [sequences=8] [output=DIR] [KNOB=VALUE ...]"
SERVER = "server"
OPTIONS = ("step", "against", "sequences", "output")
MOST_SEQUENCES = 1024
UNTEMPERED = ("actor.temperature=1.0", "gconfig.temperature=1.0")  # servers score tokens without a temperature
WIDTH = 110  # characters of the tables, where the output is no terminal


@dataclass(frozen=True)
class Comparison:
    """The command line."""

    folder: RunFolder
    step: int
    against: str  # "server", a folder of weights, or "" for the same weights under other knobs
    sequences: int
    output: Path
    changes: list[str]


def parse(arguments: Sequence[str]) -> Comparison:
    """Reads the command line.

    Raises:
        UserError: the run, the step or an option is missing or wrong.
    """
    if not arguments or "=" in arguments[0]:
        raise UserError(USAGE)
    given = dict(argument.partition("=")[::2] for argument in arguments[1:])
    changes = [a for a in arguments[1:] if a.partition("=")[0] not in OPTIONS]
    step, sequences = given.get("step", ""), given.get("sequences", "8")
    if not step.isdecimal() or int(step) < 1:
        raise UserError(f"step={step} must be the number of a step, from 1; {USAGE}")
    if not sequences.isdecimal() or not 1 <= int(sequences) <= MOST_SEQUENCES:
        raise UserError(f"sequences={sequences} must be a number from 1 to {MOST_SEQUENCES}; {USAGE}")
    against = given.get("against", "" if changes else SERVER)
    if against == SERVER and changes:
        raise UserError(
            f"{changes[0]}: against=server compares the run's own actor with a server; leave one of them out"
        )
    folder = RunFolder(Path(arguments[0]).resolve())
    output = Path(given["output"]) if "output" in given else _unused(folder.path / f"compare_{int(step):06d}")
    return Comparison(folder, int(step), against, int(sequences), output, changes)


def _unused(folder: Path) -> Path:
    """The folder, or if it is there, its name with the next number."""
    names = itertools.chain([folder.name], (f"{folder.name}_{number}" for number in itertools.count(2)))
    return next(path for path in map(folder.with_name, names) if not path.exists())


# -- the two sides ----------------------------------------------------------------------------------------------------


def weights_before(source: Source, work: Path) -> Path:
    """Makes a HF checkpoint of the actor before the source's last batch, and returns its folder."""
    batches = [str(path) for path in source.batches[:-1]]
    order = Order(overrides_of(source.facts), batches, str(source.checkpoint or ""), hf_to=str(work / "weights"))
    take_steps(order, work / "before")
    return work / "weights"


def other_weights(comparison: Comparison, source: Source, work: Path) -> Path:
    """HF checkpoint of `against`, made from a checkpoint of megarl if it is one.

    Raises:
        UserError: it is neither.
    """
    folder = Path(comparison.against)
    if (folder / "config.json").is_file():
        return folder.resolve()
    if not (folder / ACTOR / FACTS).is_file():
        raise UserError(f"against={folder} is no HF checkpoint and no checkpoints/step_* of a run; give one of them")
    try:
        manifest.read(folder).check_content()
    except Damaged as error:
        raise UserError(f"against={folder} is damaged: {error}; give another") from error
    order = Order(overrides_of(source.facts), [], str(folder.resolve()), hf_to=str(work / "other_weights"))
    take_steps(order, work / "other_before")
    return work / "other_weights"


def actor_side(overrides: Sequence[str], weights: Path, source: Source, sequences: int, folder: Path) -> None:
    """Has ranks of the overrides' layout write log-probs and layers under `weights` to `folder`.

    Raises:
        UserError: a rank failed; what it wrote is above.
    """
    folder.mkdir()
    file, parallel = folder / "side.json", cli.composed(list(overrides)).parallel
    side = {"overrides": list(overrides), "weights": str(weights), "batch": str(source.batches[-1])}
    file.write_text(json.dumps({**side, "sequences": sequences}))
    if code := run_ranks("megarl.compare", [str(file)], parallel.world_size(), folder, parallel.timeout_s):
        raise UserError(f"the side on {parallel.world_size()} ranks ended with code {code}; see above")


def server_side(config: Config, weights: Path, batch: PackedBatch, logs: Path) -> dict[str, Tensor]:
    """Log-probs of the batch's trained tokens by one server that loads `weights`."""
    from megarl.trainer.replay.compared_side import LOGPROBS  # loads Megatron
    from megarl.trainer.teacher import score_by_servers

    logs.mkdir()
    servers = SGLangServers(config.server, weights, logs, sglang=server_arguments(config), first_gpu=0)
    with servers:
        servers.start()
        servers.wait_ready()
        wait_s = config.rollout.request_timeout_s
        scorer = Scorer(servers.addresses, servers.api_key, config.teacher.max_requests, wait_s, wait_s)
        try:
            return {LOGPROBS: score_by_servers(scorer, batch, 0)["teacher_logp"]}
        finally:
            scorer.close()


def check(comparison: Comparison, run: Config, config: Config) -> None:
    """Refuses what cannot be compared.

    Raises:
        UserError: naming the knob.
    """
    if run.actor.lora.rank or config.actor.lora.rank:
        rank = run.actor.lora.rank or config.actor.lora.rank
        raise UserError(f"actor.lora.rank={rank}: runs of adapters cannot be compared; give one without")
    if isinstance(run.algorithm, RewardModelConfig):
        raise UserError("algorithm=reward_model gives scores, and no log-probs to compare")
    if comparison.against == SERVER:
        if run.method != "rl":
            raise UserError(f"method={run.method} has no servers; give against=MODEL, or knobs such as parallel=tp2")
        run_all(server_checks(run, local_folder(run.actor.path)))
    run_all(machine_checks(config))
    run_all(size_checks(config, trained_model(config.actor, read_config(config.actor.path))))


# -- the result -------------------------------------------------------------------------------------------------------


def compare(comparison: Comparison) -> int:
    """Measures both sides, prints the tables and writes page and picture. Returns the exit code.

    Raises:
        UserError: the step cannot be had, or the sides cannot be compared.
    """
    source = find(comparison.folder, comparison.step)
    own = [*overrides_of(source.facts), *UNTEMPERED]
    changed = [*overrides_of(source.facts, comparison.changes), *UNTEMPERED]
    run, config = cli.load(own), cli.load(changed)
    check(comparison, run, config)
    try:
        read_batch(source.batches[-1])
    except Damaged as error:
        raise UserError(f"step={comparison.step} cannot be compared: {error}; choose another step") from error
    from megarl.trainer.replay.compared_side import first_sequences, read_side
    from megarl.trainer.replay.drift import drift_of

    batch = first_sequences(source.batches[-1], comparison.sequences)
    with tempfile.TemporaryDirectory(prefix="megarl-compare-") as name:
        work = Path(name)
        weights = weights_before(source, work)
        actor_side(own, weights, source, comparison.sequences, work / "one")
        one = read_side(work / "one", batch.total_tokens)
        compared = batch["loss_mask"].bool().clone()
        if comparison.against == SERVER:
            other = server_side(run, weights, batch, work / "server")
        else:
            held = other_weights(comparison, source, work) if comparison.against else weights
            actor_side(changed, held, source, comparison.sequences, work / "other")
            other = read_side(work / "other", batch.total_tokens)
        compared[batch.cu_seqlens[:-1].long()] = False  # nothing predicts a first token
        drift = drift_of(batch, one, other, compared)
        tokenizer = AutoTokenizer.from_pretrained(weights)
    from megarl.trainer.replay.drift_report import report

    knobs = changed_knobs(run, config)
    names = {SERVER: "a server", "": ", ".join(knobs) or "the same knobs"}
    title = f"step {comparison.step}: the actor and {names.get(comparison.against, comparison.against)}"
    shown = report(drift, batch, tokenizer, is_server=comparison.against == SERVER)
    comparison.output.mkdir(parents=True, exist_ok=True)
    pictures = draw_panels(shown.panels, comparison.output / "compare.png")
    page = comparison.output / "compare.html"
    write_compare_page(page, title, shown.lines, pictures, shown.tables)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(title, highlight=False, markup=False)
    for heading, (names_of_columns, *rows) in shown.tables:
        console.print(_table(heading, names_of_columns, rows))
    for line in (*shown.lines, f"page      {page}"):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0


def _table(heading: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=heading, title_justify="left")
    for number, name in enumerate(names):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    return table


def command(arguments: list[str]) -> int:
    """Runs the command, or a rank of it."""
    if PARENT not in os.environ:
        return compare(parse(arguments))
    from megarl.trainer.replay import compared_side  # loads Megatron

    compared_side.measure(Path(arguments[0]))
    return 0


if __name__ == "__main__":
    if PARENT in os.environ:
        die_with_parent(int(os.environ[PARENT]))
    cli.exit_with(command, USAGE)
