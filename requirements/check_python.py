"""Says in one line why this Python cannot run megarl; run by the Makefile before anything is installed."""

import os
import sys
import sysconfig


def complaint():
    version = "%d.%d" % sys.version_info[:2]  # noqa: UP031 (this file must also run on old Pythons)
    if version not in ("3.11", "3.12", "3.13"):
        return "is Python " + version + ", megarl needs 3.11, 3.12 or 3.13: make PYTHON=python3.12"
    try:
        import ensurepip  # noqa: F401 (venv needs it; some distributions ship it apart)
        import venv  # noqa: F401
    except ImportError:
        return "has no venv: install the package python" + version + "-venv"
    if not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
        return "has no C headers, which csrc/ needs: install the package python" + version + "-dev"
    return None


if __name__ == "__main__":
    reason = complaint()
    if reason:
        sys.exit("make: " + sys.executable + " " + reason)
