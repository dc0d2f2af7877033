"""Plants bugs in a copy of the tree, one at a time, and runs the tests that should notice each.

    python tests/mutants/run_mutants.py [--only TEXT] [--again] [--table] [--deadline-min N] [--sampled N] [--seed N]
        [--areas NAME ...] [--reach]

Mutants come from `mutant_table.py`, written by hand with their tests, and from a seeded sample of the operators in
`mutant_operators.py`. Those written by hand run first, in the order in which git last changed their files, newest
first. Tests of a sampled mutant are those that call its function, the quickest first. The calls are recorded an area at
a time, such as `actor`: `--areas` records and samples only some of them, `--reach` records again. Results and records
are kept in build/mutants, so a run that was stopped goes on where it was. Each test run is forked from this process,
which has imported torch and Megatron but nothing of megarl.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mutant_accepted
import mutant_operators
import psutil
from mutant import Mutant
from mutant_table import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
WORK = Path(os.environ.get("MEGARL_MUTANTS", ROOT / "build" / "mutants"))
TREE, RESULTS = WORK / "tree", WORK / "results.jsonl"
DEADLINE_MIN = 10.0  # of one mutant's tests
TEST_BUDGET_S = 120.0  # tests of a sampled mutant are those that took at most so long together, unmutated
BUILD_DEADLINE_S = 7200.0  # for a hang alone
PRELOAD = ("torch", "transformers", "megatron.core", "hypothesis", "datasets", "aiohttp", "pytest", "sympy")
NOTICED, SURVIVED, DEADLINE, INVALID = "noticed", "survived", "deadline", "invalid"


@dataclass(frozen=True)
class Result:
    """The outcome of one mutant: how its tests ended, and the first that failed."""

    key: str
    name: str
    outcome: str
    test: str
    seconds: float
    date: str


def copied_tree() -> None:
    """Copies what git knows, changed or not, and the compiled module."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    modules = [str(path.relative_to(ROOT)) for path in ROOT.glob("megarl/_C*.so")]
    wanted = {name for name in (*names, *modules) if name and (ROOT / name).is_file()}
    for path in [path for path in TREE.rglob("*") if path.is_file()]:
        name = str(path.relative_to(TREE))
        if name not in wanted and not name.startswith("build/"):
            path.unlink()
    for name in wanted:
        target = TREE / name
        if not target.exists() or target.read_bytes() != (ROOT / name).read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)


@contextlib.contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Writes the mutant into the copy, and the original afterwards."""
    path = TREE / mutant.file
    text = path.read_text()
    path.write_text(mutant.applied_to(text))
    try:
        yield
    finally:
        path.write_text(text)


def run_tests(arguments: list[str], log: Path, deadline_s: float) -> int | None:
    """Runs pytest in a forked process in the copy. Returns its exit code, None if it met the deadline."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        become_pytest(arguments, log)
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    os.waitpid(pid, 0)
    return None


def become_pytest(arguments: list[str], log: Path) -> None:
    """Runs pytest in this process and ends it."""
    code = 70
    try:
        os.setsid()
        os.chdir(TREE)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # No bytecode: its time stamps, in seconds, do not tell a mutant from the original.
        sys.dont_write_bytecode = True
        folders = [str(TREE), str(Path(__file__).parent)]
        os.environ.update(PYTHONPATH=os.pathsep.join(folders), PYTHONDONTWRITEBYTECODE="1")
        sys.path[:] = folders + [p for p in sys.path if Path(p).resolve() not in (ROOT, Path(__file__).parent)]
        import pytest

        code = int(pytest.main(["-q", "-p", "no:cacheprovider", *arguments]))
        sys.stdout.flush()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    os._exit(code)


def built(log: Path) -> bool:
    """Compiles `_C` of the copy."""
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    environment = {**os.environ, "MEGARL_CUDA": "0"}
    with log.open("w") as output:
        done = subprocess.run(
            command, cwd=TREE, env=environment, stdout=output, stderr=output, timeout=BUILD_DEADLINE_S, check=False
        )
    return done.returncode == 0


def judge(mutant: Mutant, deadline_min: float = DEADLINE_MIN) -> Result:
    """Plants the mutant, runs the tests, and restores the copy."""
    log, started = WORK / "log.txt", time.monotonic()
    code, test = None, ""
    with planted(mutant):
        if mutant.build and not built(log):
            code, test = 1, "the compiler"
        elif mutant.tests:
            code = run_tests(["-x", *mutant.tests], log, 60 * deadline_min)
            if code == 0 and mutant.slower:
                code = run_tests(["-x", *mutant.slower], log, 60 * deadline_min)
            failed = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", log.read_text(errors="replace"), re.M)
            test = failed[1] if failed else ""
        else:
            code = 0
    outcome = {0: SURVIVED, 1: NOTICED, None: DEADLINE}.get(code, INVALID)
    text = log.read_text(errors="replace") if log.exists() else ""
    if (code is not None and code < 0) or (outcome == INVALID and "ERROR collecting" in text):
        outcome = NOTICED  # it crashed, or a test module could not be imported
    if outcome == INVALID:
        test = text[-300:]
    return Result(key_of(mutant), mutant.name, outcome, test, time.monotonic() - started, time.strftime("%Y-%m-%d"))


def key_of(mutant: Mutant) -> str:
    """Identifies a mutant over runs, as long as the file that it changes stays as it is."""
    text = mutant.applied_to((ROOT / mutant.file).read_text())
    return hashlib.sha256(f"{mutant.file}\0{text}".encode()).hexdigest()[:16]


def recorded_reach(area: str, again: bool) -> dict[str, Any]:
    """Reads the functions that each unit test of an area calls.

    Records them if `again`, or if megarl or these tests have changed since.
    """
    tests, path = f"tests/unit/{area}", WORK / f"reach-{area}.json"
    digest = hashlib.sha256()
    for source in sorted(source for folder in ("megarl", tests) for source in (TREE / folder).rglob("*.py")):
        digest.update(source.read_bytes())
    if again or not path.exists() or json.loads(path.read_text()).get("sources") != digest.hexdigest():
        print(f"recording which functions the tests of {area} call, in about the time that they take", flush=True)
        log, recorded = WORK / f"reach-{area}.log", WORK / "reach.json"
        os.environ["MEGARL_REACH"] = str(recorded)
        if run_tests(["-p", "mutant_reach", "-m", "not long", tests], log, 3 * 3600.0) not in (0, 1):
            raise SystemExit(f"the tests cannot be run: see {log}")
        path.write_text(json.dumps({**json.loads(recorded.read_text()), "sources": digest.hexdigest()}))
    reach: dict[str, Any] = json.loads(path.read_text())
    return reach


def joined_reach(areas: list[str], again: bool) -> dict[str, Any]:
    """Joins the records of several areas."""
    records = [recorded_reach(area, again) for area in areas]
    return {
        "calls": {owner: called for record in records for owner, called in record["calls"].items()},
        "seconds": {test: seconds for record in records for test, seconds in record["seconds"].items()},
        "passed": [test for record in records for test in record["passed"]],
    }


def newest_first(mutants: list[Mutant]) -> list[Mutant]:
    """Sorts mutants by the last change of their files: a rule that is new is the likeliest to lack a test."""
    command = ["git", "log", "--format=", "--name-only", "--", "megarl", "csrc"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    place: dict[str, int] = {}
    for number, file in enumerate(listed):
        place.setdefault(file, number)
    return sorted(mutants, key=lambda mutant: place.get(mutant.file, -1))


def results() -> dict[str, Result]:
    """Reads the results so far, by key."""
    if not RESULTS.exists():
        return {}
    return {entry["key"]: Result(**entry) for entry in map(json.loads, RESULTS.read_text().splitlines())}


def report(mutants: list[Mutant], known: dict[str, Result]) -> str:
    """Formats the results: every mutant that was not noticed, and the counts."""
    done = [(m, known[key_of(m)]) for m in mutants if key_of(m) in known]
    accepted = [m for m, r in done if r.outcome == SURVIVED and mutant_accepted.reason(m)]
    counted = [r for m, r in done if m not in accepted and r.outcome != INVALID]
    noticed = sum(r.outcome in (NOTICED, DEADLINE) for r in counted)
    lines = [f"{r.outcome:9} {r.name}" for m, r in done if r.outcome != NOTICED and m not in accepted]
    lines += [f"accepted  {m.name}: {mutant_accepted.reason(m)}" for m in accepted]
    deadline = sum(r.outcome == DEADLINE for r in counted)
    share = f"{100 * noticed / len(counted):.1f}%" if counted else "none"
    return "\n".join(
        [
            *lines,
            f"{len(done)} of {len(mutants)} mutants ran; noticed {noticed} of {len(counted)} ({share}, {deadline} only "
            f"by the deadline); {len(accepted)} accepted survivors besides",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--reach", action="store_true", help="record again which functions each test calls")
    names = [Path(folder).name for folder in mutant_operators.FOLDERS]
    parser.add_argument("--areas", nargs="+", choices=names, default=names, help="of the sample and its tests")
    parser.add_argument("--only", default="", help="mutants whose name or file contains this text")
    parser.add_argument("--sampled", type=int, default=mutant_operators.SAMPLE, help="mutants from operators")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--again", action="store_true", help="run the survivors again")
    parser.add_argument("--deadline-min", type=float, default=DEADLINE_MIN, help="minutes for one mutant's tests")
    parser.add_argument("--table", action="store_true", help="run nothing, print the results so far")
    arguments = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    copied_tree()
    mutants = newest_first(MUTANTS)
    if arguments.sampled:
        reach = joined_reach(arguments.areas, arguments.reach)
        sampled = (arguments.sampled, arguments.seed, arguments.areas, TEST_BUDGET_S)
        mutants += mutant_operators.sample(TREE, reach, *sampled)
    mutants = [m for m in mutants if arguments.only in m.name or arguments.only in m.file]
    known = results()
    if not arguments.table:
        for name in PRELOAD:
            __import__(name)
        for number, mutant in enumerate(mutants, 1):
            before = known.get(key_of(mutant))
            stays = not arguments.again or bool(mutant_accepted.reason(mutant))
            if before and (before.outcome != SURVIVED or stays):
                continue
            result = judge(mutant, arguments.deadline_min)
            if result.outcome != INVALID:
                with RESULTS.open("a") as file:
                    file.write(json.dumps(vars(result)) + "\n")
            known[result.key] = result
            line = f"{number}/{len(mutants)} {result.outcome} in {result.seconds:.0f} s: {mutant.name}"
            print(f"{line} [{result.test}]", flush=True)
        if any(m.build for m in mutants):
            built(WORK / "build.log")
    print(report(mutants, known))


if __name__ == "__main__":
    main()
