"""The front of every command: composes the configuration with Hydra, and turns a user's mistake into one line."""

from __future__ import annotations

import dataclasses
import difflib
import errno
import functools
import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.algorithms import ALGORITHMS, AlgorithmConfig, name_of
from megarl.checks import config_checks
from megarl.config import Config
from megarl.foreign.reading import Converted, Origin
from megarl.foreign.yaml_file import load_config
from megarl.knobs import UserError, check_ranges, does_not_exist, run_all
from megarl.knobs import override as override_of
from megarl.observe.run_folder import RunTakenError
from megarl.other_trainers import from_other_trainer, set_by
from megarl.parallel import hardware_queues, nccl_memory
from megarl.processes import open_many_files
from megarl.rollout.executor import NoSamplesError

PACKAGE = Path(__file__).resolve().parent
CONFIGS, ASSETS = (  # inside an installed package, beside it in a checkout
    next(p for p in (PACKAGE / name, PACKAGE.parent / name) if p.is_dir()) for name in ("configs", "assets")
)

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
LONGEST_LINE = 1000  # characters of an error message of Hydra


def knob_paths(schema: Any = None, prefix: str = "") -> dict[str, dataclasses.Field[Any]]:
    """Every knob by its dotted path. A knob of a dict type accepts any key below its path."""
    fields: dict[str, dataclasses.Field[Any]] = {}
    value = Config() if schema is None else schema
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if isinstance(inner, AlgorithmConfig):
            for kind, _ in ALGORITHMS.values():
                fields.update(knob_paths(kind(), f"{prefix}{field.name}."))
        elif dataclasses.is_dataclass(inner):
            fields.update(knob_paths(inner, f"{prefix}{field.name}."))
        else:
            fields[prefix + field.name] = field
    return fields


def groups() -> set[str]:
    """Names of the config groups: folders of configs/."""
    return {p.name for p in CONFIGS.iterdir() if p.is_dir()}


def load(overrides: list[str]) -> Config:
    """Composes and checks the configuration of a command line.

    Raises:
        UserError: an unknown key, a value of the wrong type, or knobs that contradict each other.
    """
    config = composed(overrides)
    if "RANK" in os.environ:
        hardware_queues.enter(config.parallel, config.reshard.overlap_scoring)  # before the checks ask for GPUs
    if config.method == "rl":  # also a trainer of one rank, which no launcher starts
        nccl_memory.enter(config.sglang)  # before the first group
    run_all(config_checks(config))
    return config


def composed(overrides: list[str]) -> Config:
    """Composes the configuration of a command line. Checks keys, types and ranges, and no rule between knobs.

    Raises:
        UserError: nothing is given, an unknown key, a value of the wrong type, or one outside the knob's range.
    """
    if not overrides:
        raise UserError("no experiment is named; give one, such as +experiment=gsm8k_grpo (--help lists them)")
    _check_keys(overrides)
    _register_schemas()
    tree = OmegaConf.create()
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            tree = compose("config", overrides)
        config: Config = OmegaConf.to_object(tree)  # type: ignore[assignment]
    except UserError as error:
        raise UserError(_named_by_source(str(error), tree)) from error
    except (HydraException, OmegaConfBaseException, ValueError, OverflowError) as error:  # numbers of many digits
        raise UserError(_one_line(error)) from error
    check_ranges(config)
    return config


def _named_by_source(message: str, tree: DictConfig) -> str:
    """Names the knob that was set, in an error of the form `KNOB=...` about a knob that copies it (`${KNOB}`)."""
    group, _, name = message.partition("=")[0].rpartition(".")
    owner = OmegaConf.select(tree, group) if name.isidentifier() else None
    stated = OmegaConf.to_container(owner, resolve=False) if isinstance(owner, DictConfig) else None
    source = re.fullmatch(r"\$\{([\w.]+)\}", str(stated.get(name))) if isinstance(stated, dict) else None
    return message.replace(f"{group}.{name}=", f"{source[1]}=", 1) if source else message


@functools.cache
def _register_schemas() -> None:
    """Makes the dataclasses known to Hydra, as the schemas of configs/. Once, as it takes a tenth of a second."""
    OmegaConf.register_new_resolver("assets", lambda name: str(ASSETS / name), replace=True)
    store = ConfigStore.instance()
    store.store("schema", _writable(OmegaConf.structured(Config(algorithm=AlgorithmConfig()))))
    for name, (kind, _) in ALGORITHMS.items():  # each file of the group starts from its schema
        store.store(f"{name}_schema", _writable(OmegaConf.structured(kind)), group="algorithm")


def run_command(command: Callable[[Config], int], usage: str = "") -> None:
    """Runs a command on the configuration of sys.argv; see `exit_with`."""
    exit_with(lambda arguments: command(load(arguments)), usage)


def exit_with(command: Callable[[list[str]], int], usage: str = "") -> None:
    """Runs a command on sys.argv and exits with its code. `--help` prints `usage`, by default that of training.

    Four errors print one line in place of a traceback. A UserError ends with exit code 2; a full disk, a step without
    any sample and a run folder that another command opened end with 1.
    """
    arguments = sys.argv[1:]
    open_many_files()
    _print_by_lines()
    _drop_noise()
    logging.basicConfig(level=logging.WARNING, format="megarl: %(message)s")
    if any(a in ("-h", "--help") for a in arguments):
        print(usage or _help())
        sys.exit(0)
    try:
        arguments, files = from_files(arguments)
        with _in_words_of(files):
            sys.exit(command(arguments))
    except UserError as error:
        print(f"megarl: {error}".encode(errors="backslashreplace").decode(), file=sys.stderr)  # it may not be UTF-8
        sys.exit(2)
    except KeyboardInterrupt:
        print("megarl: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if not (line := str(error) if isinstance(error, NoSamplesError | RunTakenError) else _full_disk(error)):
            raise
        print(f"megarl: {line}", file=sys.stderr)
        sys.exit(1)


def _print_by_lines() -> None:
    """Writes what is printed line by line. In a log the rest of a buffer would come below the error of the end."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def _drop_noise() -> None:
    """Drops warnings to developers of libraries: missing Apex and TE, deprecated names of collectives and autograd."""
    for module in ("megatron", "torchdata", "torch.distributed.c10d_logger", "torch.autograd"):
        warnings.filterwarnings("ignore", module=module)
    # Megatron advises its own developers; a torch built for CUDA warns of a toolkit without a GPU.
    for name in ("megatron", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _full_disk(error: Exception) -> str:
    """Line about a full disk or a used up quota in an error's chain of causes; "" if there is none."""
    cause: BaseException | None = error
    texts = [os.strerror(number) for number in FULL_DISK]
    while cause is not None:
        if getattr(cause, "errno", None) in FULL_DISK or any(text in str(cause) for text in texts):
            reported = " ".join(dict.fromkeys([str(error), str(cause)]))
            remedy = "free space there or set run_root to another disk, then go on with resume=RUN_FOLDER"
            return f"{' '.join(reported.split())}; {remedy}"
        cause = cause.__cause__ or cause.__context__
    return ""


def load_expr_config(
    arguments: list[str], algorithm: type[AlgorithmConfig] = AlgorithmConfig
) -> tuple[Config, Path | None]:
    """Reads the command line of a training script: the checked configuration, and the file given to `--config`.

    `algorithm` is the config class of the algorithm that the script implements, such as `GRPOConfig`.

    Raises:
        UserError: see `load`; or the configured algorithm is of another class.
    """
    _drop_noise()
    overrides, files = from_files(arguments)
    with _in_words_of(files):
        config = load(overrides)
        check_algorithm(config, algorithm)
    file = Path(arguments[arguments.index("--config") + 1]) if "--config" in arguments else None
    return config, file


def check_algorithm(config: Config, algorithm: type[AlgorithmConfig]) -> None:
    """Refuses a configuration with another algorithm than the script's.

    Raises:
        UserError: naming both.
    """
    if not isinstance(config.algorithm, algorithm):
        raise UserError(
            f"algorithm={name_of(config.algorithm)} is not what this script is for, which is "
            f"{algorithm.__name__.removesuffix('Config')}; choose that, or another script"
        )


def from_files(arguments: list[str]) -> tuple[list[str], list[Converted]]:
    """Replaces `--config FILE` and another trainer's configuration by overrides.

    Returns the arguments, and the files with the knobs that no later argument sets.
    """
    arguments, own = from_config_file(arguments)
    arguments, foreign = from_other_trainer(arguments)
    return arguments, [file for file in (own, foreign) if file is not None]


@contextmanager
def _in_words_of(files: Sequence[Converted]) -> Iterator[None]:
    """Rewords an error about a knob as one about the file's key that set it, with the file and line."""
    try:
        yield
    except UserError as error:
        message = str(error)
        for file in files:
            message = file.in_its_words(message)
        raise UserError(message) from error


def from_config_file(arguments: list[str]) -> tuple[list[str], Converted | None]:
    """Replaces `--config FILE` by overrides, placed before all other arguments, which therefore win.

    The file is YAML with the keys of configs/experiment/: knobs, groups by name, and a list `defaults` of groups to
    override. `experiment: NAME` starts from a recipe.

    Raises:
        UserError: the file does not exist, or holds no mapping of keys.
    """
    if "--config" not in arguments:
        return arguments, None
    at = arguments.index("--config")
    if at + 1 == len(arguments):
        raise UserError("--config needs the path of a YAML file")
    path, rest = arguments[at + 1], arguments[:at] + arguments[at + 2 :]
    values, lines = load_config(path)
    overridden = set_by(rest)
    chosen = _chosen_groups(values, lines.at("defaults") or path)
    selected = [
        f"{'+' * (group == 'experiment')}{group}={name}" for group, name in chosen.items() if group not in overridden
    ]
    overrides = [*selected, *overrides_of(values)]
    origins = {knob: Origin(knob) for knob in set_by(overrides) - overridden}
    return [*overrides, *rest], Converted(overrides, "", path, origins, lines)


def _chosen_groups(values: dict[Any, Any], where: str) -> dict[str, Any]:
    """Removes groups from a file's keys: `algorithm: dapo`, and `override /algorithm: dapo` in its `defaults`."""
    known, chosen = groups(), {}
    for entry in values.pop("defaults", None) or []:
        if entry == "_self_":
            continue
        (key, name), *more = entry.items() if isinstance(entry, dict) else [(entry, None)]
        group = str(key).removeprefix("override").strip().removeprefix("/")
        if more or name is None or group not in known:
            raise UserError(
                f"{where}: defaults holds {entry!r}, which is no `override /GROUP: NAME` with a group of "
                f"{', '.join(sorted(known))}"
            )
        chosen[group] = name
    return chosen | {key: values.pop(key) for key in [*values] if key in known and not isinstance(values[key], dict)}


def overrides_of(values: dict[Any, Any], prefix: str = "") -> Iterator[str]:
    """Yields an override per knob of nested keys."""
    knobs = knob_paths()
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and path not in knobs:
            yield from overrides_of(value, f"{path}.")
        elif isinstance(value, dict):  # a knob of a dict type
            yield from ("+" + override_of(f"{path}.{inner}", content) for inner, content in value.items())
        else:
            yield override_of(path, value)


def _help() -> str:
    experiments = ", ".join(sorted(p.stem for p in (CONFIGS / "experiment").glob("*.yaml")))
    return (
        "usage: python -m megarl.train [SCRIPT.py] [--config FILE] +experiment=NAME [GROUP=NAME ...] [KNOB=VALUE ...]\n"
        f"  experiments  {experiments}\n"
        f"  groups       {', '.join(sorted(groups() - {'experiment'}))}\n"
        "  knobs        docs/configuration.md, such as total_train_steps=20 actor.path=DIR parallel.tp_size=2\n"
        "  resume       resume=runs/EXPERIMENT/latest\n"
        "  launcher     launcher=local, slurm or ray, or python -m megarl.launcher.NAME; every rank runs SCRIPT.py\n"
        "python -m megarl.preflight takes the same, and show=memory|layout|reshard, and says what would stop the run"
    )


def _writable(node: DictConfig) -> DictConfig:
    """Makes the schema nodes of frozen dataclasses writable for overrides."""
    OmegaConf.set_readonly(node, False)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none():
            _writable(child)
    return node


def _check_keys(overrides: list[str]) -> None:
    """Refuses keys that are neither a knob nor a group, and suggests the nearest name."""
    parser, keys = OverridesParser.create(), []
    for override in overrides:
        try:
            keys.append(parser.parse_override(override).key_or_group)
        except (HydraException, ValueError) as error:  # ValueError: an integer of thousands of digits
            rule = "cannot be read as KNOB=VALUE; brackets or spaces in a value need quotes: \"stop='[a]'\""
            raise UserError(f"{override[:200]!r} {rule}") from error
    known = [*(knobs := knob_paths()), *groups()]
    open_ended = tuple(f"{path}." for path, field in knobs.items() if "dict[" in str(field.type))
    for key in keys:
        if key not in known and not key.startswith(open_ended):
            raise UserError(_unknown(key, known))


def _unknown(key: str, known: list[str]) -> str:
    last = [path for path in known if path.rpartition(".")[2] == key.rpartition(".")[2]]
    near = last[:1] or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else "; docs/configuration.md lists all knobs"
    return f"unknown config key {key}{hint}"


def _one_line(error: Exception) -> str:
    """Turns a message of Hydra or OmegaConf into one line, without its context lines."""
    text, cause = str(error), str(error.__cause__ or "")
    if missing := re.search(r"Could not find '([^']+)/([^']+)'", text):
        group, name = missing.groups()
        names = sorted(p.stem for p in (CONFIGS / group).glob("*.yaml"))
        return does_not_exist(f"{group}={name}", name, names)
    unknown = re.search(r"Key '[^']+' not in[\s\S]*?full_key: (\S+)", f"{text}\n{cause}")
    where = re.search(r"In '([^']+)'", text)
    kind = re.search(r"object_type=(\w+)", f"{text}\n{cause}")
    if unknown and kind and unknown.group(1) in knob_paths():  # a knob of another algorithm
        names = [
            field.name
            for name, (config, _) in ALGORITHMS.items()
            if config.__name__ == kind.group(1)
            for field in dataclasses.fields(config)
        ]
        return f"{unknown.group(1)} is not a knob of {kind.group(1).removesuffix('Config')}; it has {', '.join(names)}"
    if unknown:
        place = f" (in configs/{where.group(1)}.yaml)" if where else ""
        return _unknown(unknown.group(1), list(knob_paths())) + place
    lines = [line.strip() for line in f"{text}\n{cause}".splitlines() if line.strip()]
    context = ("reference_type", "object_type", "See https")
    line = "; ".join(dict.fromkeys(line for line in lines if not line.startswith(context)))
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}..."
