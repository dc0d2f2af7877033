"""Permissions and limits of code in the sandbox."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from megarl.sandbox import SandboxResult, run_python


def test_code_runs_with_stdin_the_standard_library_and_threads() -> None:
    thread = "t = threading.Thread(target=print, args=(input(),)); t.start(); t.join()"
    done = run_python(f"import math, threading\n{thread}\nprint(math.pi)", "hello\n")
    assert done == SandboxResult("ok", "hello\n3.141592653589793\n", "")


def test_files_can_be_written_in_the_temporary_folder_which_is_removed_afterwards() -> None:
    done = run_python("import os; open('a', 'w').write('x'); print(os.getcwd(), open('a').read())")
    folder, content = done.stdout.split()
    assert content == "x"
    assert not Path(folder).exists()


@pytest.mark.parametrize(
    "code",
    [
        "import socket; socket.socket()",
        "import socket; socket.socket(socket.AF_UNIX)",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:1')",
        "import os; os.fork()",
        "import os; os.system('true') and exit(1)",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.execv('/bin/true', ['true'])",
        "import multiprocessing as m; p = m.Process(target=print); p.start()",
        "import os; os.kill(os.getppid(), 9)",
        "import ctypes; assert ctypes.CDLL(None).ptrace(0, 0, 0, 0) == 0",
        "import os; os.setsid()",
        "a = bytearray(8 * 2**30)",
        "open('big', 'wb').write(b'x' * 2**26)",
        "raise SystemExit(3)",
        "1 / 0",
        "(",
    ],
)
def test_forbidden_code_fails(code: str) -> None:
    assert run_python(code).status == "failed"


def test_nothing_outside_can_be_written_or_removed(tmp_path: Path) -> None:
    target = tmp_path / "kept"
    target.write_text("kept")
    for code in (
        f"open({str(target)!r}, 'w')",
        f"import os; os.remove({str(target)!r})",
        f"import os; os.truncate({str(target)!r}, 0)",
    ):
        assert run_python(code).status == "failed"
    assert target.read_text() == "kept"
    assert run_python(f"open({str(tmp_path / 'new')!r}, 'w')").status == "failed"
    assert os.listdir(tmp_path) == ["kept"]


@pytest.mark.parametrize(
    "code", ["while True: pass", "import time; time.sleep(60)", "import os; os.close(1); os.close(2); input(); input()"]
)
def test_time_is_limited_and_no_process_remains(code: str) -> None:
    assert run_python(code, time_limit_s=0.5).status in ("time", "failed")
    assert not [p for p in psutil.Process().children(recursive=True) if "sandbox_child" in " ".join(p.cmdline())]


def test_output_is_limited() -> None:
    done = run_python("while True: print('x' * 1000)", output_limit=5000)
    assert done.status == "output"
    assert len(done.stdout) == 5000


def test_the_environment_is_empty() -> None:
    assert set(eval(run_python("import os; print(list(os.environ))").stdout)) <= {
        "HOME",
        "TMPDIR",
        "LANG",
        "OMP_NUM_THREADS",
        "LC_CTYPE",
    }
