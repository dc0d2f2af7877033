"""Reads configurations of other trainers into overrides: TRL, verl and AReaL; axolotl's reader shares the pieces."""
