"""The stages: one whole program per kind of work, each read from top to bottom."""
