"""The workflow for users' own CI, held to the files that its commands name. GitHub's runners are not here to run it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
WORKFLOW: dict[Any, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
WORKDIR = "/opt/src/megarl"  # of the sources in the image


def steps(job: str) -> list[dict[str, Any]]:
    return WORKFLOW["jobs"][job]["steps"]


def commands() -> Iterator[list[str]]:
    for job in WORKFLOW["jobs"].values():
        for step in job["steps"]:
            if "run" in step:
                yield from (shlex.split(line) for line in step["run"].strip().splitlines())


def docker(verb: str) -> list[str]:
    (words,) = [words for words in commands() if words[:2] == ["docker", verb]]
    return words


def test_pushes_run_the_suite_and_only_a_person_starts_the_rest() -> None:
    assert [path.name for path in FILES] == ["ci.yml"]
    triggers = WORKFLOW[True]  # YAML 1.1 reads the key `on` so
    assert set(triggers) == {"push", "pull_request", "workflow_dispatch"}
    assert set(WORKFLOW["jobs"]) == {"suite", "image", "acceptance"}
    assert "if" not in WORKFLOW["jobs"]["suite"]
    for job in ("image", "acceptance"):
        assert "github.event_name == 'workflow_dispatch'" in WORKFLOW["jobs"][job]["if"]
    used = re.search(r"inputs\.(\w+)", WORKFLOW["jobs"]["acceptance"]["if"])
    assert used is not None
    assert used[1] in triggers["workflow_dispatch"]["inputs"]
    assert WORKFLOW["jobs"]["acceptance"]["runs-on"] == ["self-hosted", "gpu"]
    assert all(job["timeout-minutes"] > 0 for job in WORKFLOW["jobs"].values())


def test_every_action_is_pinned_to_a_version() -> None:
    used = [step["uses"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "uses" in step]
    assert len(used) > 4
    assert [name for name in used if not re.fullmatch(r"[\w-]+/[\w-]+@v\d+", name)] == []


def test_the_suite_is_the_one_command_of_ci_on_a_python_that_megarl_supports() -> None:
    (line,) = [words for words in commands() if ".ci/run" in words]
    assert line[0] == "sudo"
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    (python,) = [step["with"]["python-version"] for step in steps("suite") if "python-version" in step.get("with", {})]
    assert (3, 11) <= tuple(map(int, python.split("."))) <= (3, 13)


def test_every_make_target_exists() -> None:
    targets = [words[words.index("make") + 1] for words in commands() if "make" in words]
    assert targets == ["gpu-acceptance"]
    for target in targets:
        dry = subprocess.run(
            ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
        )
        (script,) = re.findall(r"benchmarks/\w+\.py", dry.stdout)
        assert (ROOT / script).is_file()


def test_builds_take_the_dockerfile_and_its_arguments() -> None:
    arguments = set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.M))
    (build,) = [step["with"] for step in steps("image") if step.get("uses", "").startswith("docker/build-push-action")]
    assert build["context"] == "."
    assert build["cache-from"] == "type=gha"
    given = {line.partition("=")[0] for line in build["build-args"].split()}
    words = docker("build")
    given |= {words[i + 1].partition("=")[0] for i, word in enumerate(words) if word == "--build-arg"}
    assert given <= arguments
    assert words[-1] == "."
    assert words[words.index("--tag") + 1] == build["tags"]


def test_the_acceptance_runs_in_the_images_sources_and_its_files_come_back() -> None:
    words = docker("run")
    assert words[words.index("--workdir") + 1] == WORKDIR
    assert re.search(rf"^WORKDIR {WORKDIR}$", DOCKERFILE, re.M)
    assert "--gpus" in words
    image = docker("build")[docker("build").index("--tag") + 1]
    assert words[-3:] == [image, "make", "gpu-acceptance"]
    mounted = {}
    for i, word in enumerate(words):
        if word == "--volume":
            outside, _, inside = words[i + 1].partition(":")
            mounted[outside.removeprefix("$PWD/")] = inside.removeprefix(WORKDIR + "/")
    assert all(outside == inside for outside, inside in mounted.items())
    assert (ROOT / "docs" / "numbers.md").is_file()
    (kept,) = [step["with"]["path"] for step in steps("acceptance") if "upload-artifact" in step.get("uses", "")]
    assert set(kept.split()) == set(mounted)
    script = (ROOT / "benchmarks" / "gpu_acceptance.py").read_text()
    assert 'ROOT / "build" / "gpu-acceptance"' in script
    assert 'ROOT / "docs" / "numbers.md"' in script


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_value_of_an_event_reaches_a_shell(path: Path) -> None:
    """Text from a pull request inside `run` would be code."""
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        assert [step for step in job["steps"] if "${{" in step.get("run", "")] == []
