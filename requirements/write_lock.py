"""Writes requirements/lock.txt: the indirect dependencies of this environment, as constraints. `make lock` runs it.

What pyproject.toml pins is left out, so that every version is written once. So is what torch itself pins exactly
(its CUDA libraries) and the label of a local build (`+cpu`), so that the file serves with and without a GPU.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

LOCK = Path(__file__).with_name("lock.txt")
PYPROJECT = LOCK.parents[1] / "pyproject.toml"
HEADER = "# Indirect dependencies, held still. Written by `make lock`; direct ones are pinned in pyproject.toml.\n"
FROM_TORCH = re.compile(r"^(nvidia-|cuda-|triton$|torch$)")


def canonical(requirement: str) -> str:
    """The package's name as PEP 503 normalises it: `Jinja2==3.1` -> `jinja2`."""
    name = re.split(r"[^A-Za-z0-9._-]", requirement.strip(), maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def lock_lines(frozen: list[str], pyproject: dict) -> list[str]:
    """The lines of `pip freeze` that are neither pinned in pyproject.toml, nor torch's own, nor local builds."""
    pinned = {canonical(line) for line in pyproject["project"]["dependencies"]}
    for group in pyproject["dependency-groups"].values():
        pinned |= {canonical(line) for line in group}
    pinned.add(canonical(pyproject["project"]["name"]))
    versions = {}
    for line in frozen:
        name = canonical(line)
        if "==" not in line or name in pinned or FROM_TORCH.match(name):
            continue
        versions[name] = line.split("==")[1].split("+")[0].strip()
    return [f"{name}=={version}" for name, version in sorted(versions.items())]


def main() -> None:
    command = [sys.executable, "-m", "pip", "freeze", "--exclude-editable"]
    frozen = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    lines = lock_lines(frozen, tomllib.loads(PYPROJECT.read_text()))
    LOCK.write_text(HEADER + "\n".join(lines) + "\n")
    print(f"{LOCK.name}: {len(lines)} indirect dependencies")


if __name__ == "__main__":
    main()
