"""Training checkpoints to safetensors folders: never unpickled, in bounded memory, without torch or transformers.

`convert` publishes a new folder, `write_into` fills one for a caller that publishes it, `inspect` only
looks, `follow` converts what a running training saves.
"""

from bridge.convert.api import MAX_SHARD_SIZE, Report, convert, inspect, parse_size, write_into
from bridge.convert.follow import follow
from bridge.convert.plan import check_dtype

__all__ = ["MAX_SHARD_SIZE", "Report", "check_dtype", "convert", "follow", "inspect", "parse_size", "write_into"]
