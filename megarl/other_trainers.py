"""Options `--from-axolotl`, `--from-areal`, `--from-trl` and `--from-verl`: a configuration of theirs as overrides."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence

from megarl.foreign.reading import Converted
from megarl.knobs import UserError
from megarl.parallel.config import MAX_RANKS

# Options of another trainer's configuration, with the number of words that follow.
TRAINERS = {"--from-axolotl": 1, "--from-areal": 1, "--from-trl": 2, "--from-verl": 0}


def set_by(overrides: Sequence[str]) -> set[str]:
    """Knobs and groups that overrides set."""
    return {override.lstrip("+").partition("=")[0] for override in overrides}


def from_other_trainer(arguments: list[str]) -> tuple[list[str], Converted | None]:
    """Replaces the options of another trainer's configuration by overrides, placed before all other arguments.

    They are `--from-axolotl FILE`, `--from-areal FILE`, `--from-trl METHOD FILE`, and `--from-verl KEY=VALUE ...`, of
    which `--` ends the keys. `--num-processes N` is the number of trainer ranks, as in axolotl and accelerate. A table
    of the keys and their knobs is printed, on one rank.

    Raises:
        UserError: options are incomplete or contradict each other; or see the readers in `axolotl/` and `foreign/`.
    """
    arguments, processes = _num_processes(arguments)
    option = next((a for a in arguments if a in TRAINERS), None)
    if option is None:
        if processes is not None:
            raise UserError(f"--num-processes {processes} belongs to {', '.join(TRAINERS)}; use parallel.dp_size")
        return arguments, None
    at = arguments.index(option)
    end = len(arguments) if option == "--from-verl" else at + 1 + TRAINERS[option]
    if option == "--from-verl" and "--" in arguments[at:]:
        end = arguments.index("--", at)
    if end > len(arguments) or any(a.startswith("--from-") for a in arguments[at + 1 :]):
        needed = {"--from-trl": "the method and the path of a YAML file, such as grpo run.yaml"}
        raise UserError(f"{option} needs {needed.get(option, 'the path of a YAML file')}, and stands alone")
    given, rest = arguments[at + 1 : end], [a for a in arguments[:at] + arguments[end:] if a != "--"]
    converted = _read(option, given, rest, processes)
    if "RANK" not in os.environ:
        print(converted.table, flush=True)
    later = set_by(rest)
    origins = {knob: origin for knob, origin in converted.origins.items() if knob not in later}
    return converted.overrides + rest, dataclasses.replace(converted, origins=origins)


def _read(option: str, given: list[str], rest: list[str], processes: int | None) -> Converted:
    """Reads the other trainer's configuration for this number of ranks."""
    stated = [a.partition("=")[2] for a in rest if a.startswith("parallel.dp_size=")]
    replicas = int(stated[-1]) if stated and stated[-1].isdecimal() else None
    if processes is not None and replicas is not None:
        raise UserError(f"--num-processes {processes} and parallel.dp_size={replicas} are both given; leave one out")
    world = processes or int(os.environ.get("WORLD_SIZE", "1"))
    if option == "--from-axolotl":  # the readers load `datasets`
        from megarl.axolotl.read import read_axolotl

        converted = read_axolotl(given[0], replicas, world)
    elif option == "--from-trl":
        from megarl.foreign.trl import read_trl

        converted = read_trl(given[0], given[1], replicas, world)
    elif option == "--from-areal":
        from megarl.foreign.areal import read_areal

        converted = read_areal(given[0])
    else:
        from megarl.foreign.verl import read_verl

        converted = read_verl(given)
    return converted if processes is None else _on_ranks(converted, processes)


def _num_processes(arguments: list[str]) -> tuple[list[str], int | None]:
    """Takes `--num-processes N` out of the arguments."""
    names = ("--num-processes", "--num_processes")
    at = next((i for i, a in enumerate(arguments) if a.partition("=")[0] in names), None)
    if at is None:
        return arguments, None
    name, equals, value = arguments[at].partition("=")
    value = value if equals else (arguments[at + 1] if at + 1 < len(arguments) else "")
    if not value.isdecimal() or not 0 < int(value) <= MAX_RANKS:
        raise UserError(f"{name} {value} must be a number of trainer ranks from 1 to {MAX_RANKS}")
    return arguments[:at] + arguments[at + (1 if equals else 2) :], int(value)


def _on_ranks(converted: Converted, ranks: int) -> Converted:
    """Lays a configuration out on this number of ranks."""
    sizes = dict.fromkeys(("tp_size", "pp_size", "cp_size", "dp_size"), "")
    for name in sizes:
        sizes[name] = next((a.partition("=")[2] for a in converted.overrides if a.startswith(f"parallel.{name}=")), "")
    model = math.prod(int(sizes[name] or 1) for name in ("tp_size", "pp_size", "cp_size"))
    if ranks % model or (sizes["dp_size"] and int(sizes["dp_size"]) * model != ranks):
        stated = ", ".join(f"parallel.{name}={size}" for name, size in sizes.items() if size)
        raise UserError(f"--num-processes {ranks} does not fit {stated} of {converted.source}; change one of them")
    overrides = [*converted.overrides, f"parallel.dp_size={ranks // model}"]
    return dataclasses.replace(converted, overrides=overrides)
