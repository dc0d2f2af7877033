"""How bytes travel from the trainer to the ranks of a server."""
