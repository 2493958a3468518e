"""Training checkpoints to safetensors folders: never unpickled, in bounded memory, without torch or transformers.

`convert` publishes a new folder, `write_into` fills one for a caller that publishes it, `inspect` only looks.
"""

from bridge.convert.api import MAX_SHARD_SIZE, Report, convert, inspect, parse_size, write_into

__all__ = ["MAX_SHARD_SIZE", "Report", "convert", "inspect", "parse_size", "write_into"]
