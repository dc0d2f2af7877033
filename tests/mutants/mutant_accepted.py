"""Survivors that stay: mutants that change nothing a user could notice, with the reason."""

from __future__ import annotations

from mutant import Mutant

# By a part of the mutant's name, as `run_mutants.py` prints it, without its line number.
ACCEPTED: dict[str, str] = {}


def reason(mutant: Mutant) -> str:
    """Returns why this mutant may survive, "" if it may not."""
    return next((why for part, why in ACCEPTED.items() if part in mutant.name), "")
