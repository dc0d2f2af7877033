"""Docker's command line as the Harbor adapter uses it; a container is a folder. Arguments: ROOT, then Docker's own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

root, command, *arguments = sys.argv[1:]


def folder(container: str) -> Path:
    return Path(root) / "containers" / container


def inside(container: str, words: list[str]) -> list[str]:
    """A command with the container's paths."""
    home = folder(container)
    return [f"{home}{word}" if word.startswith(("/logs", "/tests")) else word for word in words]


if command == "run":
    name = arguments[arguments.index("--name") + 1]
    assert {"--rm", "-i", "--memory=512m", "debian"} <= set(arguments)
    home = folder(name)
    (home / "logs" / "verifier").mkdir(parents=True)
    print("ready", flush=True)
    sys.stdin.read()
    shutil.rmtree(home, ignore_errors=True)
elif command == "exec":
    name, *words = arguments
    home = folder(name)
    sys.exit(subprocess.run(inside(name, words), cwd=home, env={**os.environ, "ROOT": str(home)}).returncode)
elif command == "cp":
    source, target = arguments
    name, _, path = target.partition(":")
    shutil.copytree(source, folder(name) / path.strip("/"), dirs_exist_ok=True)
    script = folder(name) / path.strip("/") / "test.sh"
    script.write_text(script.read_text().replace(" /logs/", f" {folder(name)}/logs/"))
elif command == "kill":
    pass  # the folder's holder reads the end of its input
else:
    sys.exit(f"the stand-in has no {command}")
