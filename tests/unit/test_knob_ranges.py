"""Every number among the knobs has a range in its declaration, and a value outside it is refused in one line."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable
from typing import Any

import pytest

from megarl import cli
from megarl.algorithms import ALGORITHMS, AlgorithmConfig
from megarl.config import Config
from megarl.knobs import Range, UserError, check_ranges, knob, range_errors
from megarl.ops.loss import PolicyLossSettings
from tests import rows
from tests.exit_codes import exit_code, reads_its_configuration

pytestmark = rows.marks()
RECIPES = {"rl": "gsm8k_grpo", "preference": "dpo"}


@dataclasses.dataclass(frozen=True)
class Knob:
    """One knob of one algorithm's configuration."""

    path: str
    owner: type
    field: dataclasses.Field[Any]
    types: tuple[type, ...]  # None excluded; of a list's entries
    is_list: bool
    algorithm: str

    @property
    def range(self) -> Range:
        declared: Range = self.field.metadata["range"]
        return declared

    @property
    def is_number(self) -> bool:
        return bool({int, float} & set(self.types))

    def arguments(self, value: Any) -> list[str]:
        """Command line that sets the knob to a value; a list to two of them."""
        text = str(value)
        value = f"[{text},{text}]" if self.is_list else text
        if ".sources." in self.path:  # only within a list of sources
            data, _, name = self.path.partition(".sources.")
            return [
                f"+experiment={self.recipe}",
                f"algorithm={self.algorithm}",
                f"{data}.sources=[{{path:a,{name}:{value}}}]",
            ]
        return [f"+experiment={self.recipe}", f"algorithm={self.algorithm}", f"{self.path}={value}"]

    @property
    def recipe(self) -> str:
        return RECIPES["rl" if "RLConfig" in str(ALGORITHMS[self.algorithm][0].__mro__) else "preference"]


def knobs_of(owner: type, path: str = "", algorithm: str = "grpo") -> list[Knob]:
    """All knobs below a dataclass. The algorithms' knobs are those of each algorithm."""
    knobs: list[Knob] = []
    hints = typing.get_type_hints(owner)
    for field in dataclasses.fields(owner):
        name, hint = f"{path}{field.name}", hints[field.name]
        if hint is AlgorithmConfig:
            for kind, (config, _) in ALGORITHMS.items():
                knobs += knobs_of(config, f"{name}.", kind)
            continue
        inner = [kind for kind in typing.get_args(hint) or (hint,) if kind is not type(None)]
        if dataclasses.is_dataclass(inner[0]):
            knobs += knobs_of(inner[0], f"{name}.", algorithm)
            continue
        is_list = typing.get_origin(hint) is list
        types = () if typing.get_origin(hint) is dict else tuple(inner)
        knobs.append(Knob(name, owner, field, types, is_list, algorithm))
    return knobs


ALL = [*{(item.path, id(item.field)): item for item in knobs_of(Config)}.values()]  # a base's knobs once
NUMBERS = [item for item in ALL if item.is_number]
CHOICES = [item for item in ALL if item.range.choices]


def outside(item: Knob) -> list[float]:
    """Values outside a number's range: no numbers, far away, and just past both ends."""
    declared, is_whole = item.range, int in item.types
    values = [math.nan, math.inf, -math.inf, 1e300, -1e300]
    for bound, sign in ((declared.least, -1), (declared.above, -1), (declared.most, 1), (declared.below, 1)):
        if bound is not None:
            step = 1.0 if is_whole else max(abs(bound), 1.0) * 1e-6
            values += [bound + sign * step] + [bound] * (bound in (declared.above, declared.below))
    return [int(value) if is_whole and math.isfinite(value) else value for value in values]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[list[str]], str]:
    """Runs a command that reads its configuration, expects exit code 2, and returns its one line."""

    def run(arguments: list[str]) -> str:
        code = exit_code(reads_its_configuration, arguments, monkeypatch)
        text = capsys.readouterr().err
        assert code == 2, (arguments, text)
        assert len(text.splitlines()) == 1, (arguments, text)
        assert text.startswith("megarl: "), (arguments, text)
        return text

    return run


def test_the_walk_meets_every_knob_of_the_command_line() -> None:
    assert {item.path for item in ALL if ".sources." not in item.path} == set(cli.knob_paths()) - {
        f"{data}_dataset.sources" for data in ("train", "valid")
    }
    assert len(NUMBERS) > 100
    assert len(CHOICES) > 25


def test_every_number_has_a_lower_and_an_upper_end_that_are_finite() -> None:
    for item in NUMBERS:
        declared = item.range
        lower = [bound for bound in (declared.least, declared.above) if bound is not None]
        upper = [bound for bound in (declared.most, declared.below) if bound is not None]
        assert len(lower) == len(upper) == 1, f"{item.path}: give least or above, and most or below"
        assert math.isfinite(lower[0])
        assert math.isfinite(upper[0])
        assert lower[0] < upper[0], item.path


def test_the_defaults_of_all_knobs_are_inside_their_ranges() -> None:
    assert list(range_errors(Config())) == []
    for config, _ in ALGORITHMS.values():
        assert list(range_errors(config(), "algorithm")) == []


def test_every_value_outside_the_range_of_a_number_is_refused() -> None:
    for item in NUMBERS:
        for value in outside(item):
            with pytest.raises(UserError, match=f"{item.field.name}.*must be") as caught:
                check_ranges(item.owner(**{item.field.name: [value] if item.is_list else value}))
            assert len(str(caught.value).splitlines()) == 1
            assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "argument",
    [
        "cluster.gpus_per_node=129", "cluster.gpus_per_node=1000000000000", "cluster.gpu_memory_gib=0",
        "train_dataset.batch_size=-1", "train_dataset.num_workers=-1", "train_dataset.max_length=0",
        "gconfig.temperature=inf", "actor.optimizer.lr=inf", "algorithm.entropy_coef=nan",
        "algorithm.advantage_eps=-1", "reshard.max_logprob_diff=nan", "reshard.bucket_bytes=1e25", "server.port=70000",
        "server.dtype=foo", "method=foo",
    ],
)  # fmt: skip
def test_nonsense_is_refused_whatever_range_is_declared(argument: str, refused: Callable[[list[str]], str]) -> None:
    """Values once accepted, or taken for gigabytes of a preflight: no range may grow to hold them."""
    assert argument.partition("=")[0].rpartition(".")[2] in refused(["+experiment=gsm8k_grpo", argument])


@pytest.mark.parametrize("half", [0, 1])
def test_a_number_outside_its_range_is_one_line_and_exit_code_2(half: int, refused: Callable[[list[str]], str]) -> None:
    for number, item in enumerate(rows.every(8, NUMBERS[half::2])):  # the test above has all, without a command
        values = outside(item)
        value = values[number % len(values)]  # all kinds of values in turn
        line = refused(item.arguments(value))
        is_no_integer = "could not be converted to Integer" in line
        assert is_no_integer or (item.field.name in line and "must be" in line), line


def test_an_unknown_choice_is_one_line_with_the_choices(refused: Callable[[list[str]], str]) -> None:
    for item in rows.every(6, CHOICES):
        wrong = item.range.choices[0] + "x"
        line = refused(item.arguments(wrong))
        assert f"{item.field.name}={wrong} must be one of " in line  # actor.dtype is server.dtype's too
        assert "did you mean" in line or len(wrong) < 4, line


def test_text_with_a_nul_character_or_half_a_surrogate_pair_is_refused(refused: Callable[[list[str]], str]) -> None:
    strings = [item for item in ALL if item.types == (str,) and not item.range.choices]
    assert len(strings) > 20
    for number, item in enumerate(strings):
        value = ("a\0b", "a\ud800b")[number % 2]
        with pytest.raises(UserError, match="must be UTF-8 without NUL characters"):
            check_ranges(item.owner(**{item.field.name: [value] if item.is_list else value}))
    assert "must be UTF-8 without NUL characters" in refused(["+experiment=gsm8k_grpo", "actor.path='a\0b'"])


def test_a_path_longer_than_the_system_takes_is_refused(refused: Callable[[list[str]], str]) -> None:
    paths = [item for item in ALL if item.range.path]
    assert len(paths) > 8
    for item in paths:
        for text in ("x" * 256, "y/" * 3000):
            with pytest.raises(UserError, match=r"must be (a path of at most 4095|one folder name)") as caught:
                check_ranges(item.owner(**{item.field.name: text}))
            assert len(str(caught.value)) < 400
    assert "run_root" in refused(["+experiment=gsm8k_grpo", "run_root=" + "y/" * 3000])


def test_a_config_made_in_python_is_refused_like_a_command_line() -> None:
    with pytest.raises(UserError, match=r"^clip_low=nan must be at least 0"):
        PolicyLossSettings(clip_low=math.nan)
    with pytest.raises(UserError, match=r"^objective=clop must be one of clip, cispo; did you mean clip\?"):
        PolicyLossSettings(objective="clop")
    with pytest.raises(UserError, match=r"^dual_clip=1 must be above 1"):
        PolicyLossSettings(dual_clip=1)


def test_a_knob_without_a_range_still_takes_no_infinity() -> None:
    @dataclasses.dataclass(frozen=True)
    class Loose:
        """A part."""

        rate: float = knob(1.0, "how fast")
        extra: dict[str, Any] = knob(factory=dict, meaning="anything")

    check_ranges(Loose(extra={"a": [1.0, "b", None, True]}))
    with pytest.raises(UserError, match=r"part\.rate=inf must be finite \(how fast\)"):
        check_ranges(Loose(rate=math.inf), "part")
    with pytest.raises(UserError, match=r"^extra=.* must be finite"):
        check_ranges(Loose(extra={"a": [math.nan]}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gconfig.min_new_tokens=1000"], "gconfig.min_new_tokens=1000 must be at most gconfig.max_new_tokens=24"),
        (["gconfig.stop=['']"], "gconfig.stop holds an empty string"),
        (["gconfig.top_k=0"], "gconfig.top_k=0 must be -1, for all tokens, or at least 1"),
        (["server.port=65530", "server.n_servers=7"], "server.port=65530 with server.n_servers=7 needs ports above"),
        (["experiment_name=../../x"], "experiment_name=../../x must be one folder name"),
        (["experiment_name=''"], "experiment_name= must be one folder name"),
        (["reshard.bucket_bytes=1e25"], "Value '1e+25' of type 'float' could not be converted to Integer"),
        (["seed=" + "9" * 300], "seed=(a number of 30"),
        (["seed=" + "9" * 5000], "cannot be read as KNOB=VALUE"),
        (["critic_optimizer.lr=nan"], "critic_optimizer.lr=nan must be above 0"),
        (["critic_optimizer.adam_beta2=5"], "critic_optimizer.adam_beta2=5.0 must be at least 0 and below 1"),
        (["critic_optimizer.lr_decay_style=consine"], "did you mean cosine?"),
        (["+sglang.max_running_requests=-3"], "sglang.max_running_requests=-3 must be at least -1"),
        (["+sglang.mem_fraction_static=1.5"], "sglang.mem_fraction_static=1.5 must be above 0 and below 1"),
        (["+sglang.mem_fraction_static=most"], "sglang.mem_fraction_static=most must be above 0 and below 1"),
        (["+sglang.schedule_conservativeness=-0.1"], "sglang.schedule_conservativeness=-0.1 must be at least 0"),
        (["+sglang.ep_size=1.5"], "sglang.ep_size=1.5 must be a whole number"),
        (["+sglang.mem_fraction_static=nan"], "sglang={'mem_fraction_static': nan} must be finite"),
    ],
)
def test_nonsense_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, refused: Callable[[list[str]], str]
) -> None:
    assert message in refused(["+experiment=gsm8k_grpo", *arguments])
