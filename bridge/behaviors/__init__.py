"""What BRIDGE injects into a worked solution, for any task whose problems are graphs of quantities."""

from bridge.behaviors.solution import solution, writer
from bridge.behaviors.wording import phrases

__all__ = ["phrases", "solution", "writer"]
