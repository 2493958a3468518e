"""bridge: a language model through data, SFT, RL and evaluation, on a Slurm cluster or on one machine."""

__version__ = "0.1.0"
