"""Stores many small files in a few tar files (webdataset's layout), and reads any of them by its offset.

No torch; the content of the bytes is not interpreted. Start from `shard_index.index_shards` and
`shard_reader.ShardReader`; `write_shards.write_shards` packs shards. The names below are public (docs/public_names.md).
"""

from wellfed.data.shards.shard_index import ShardIndex, find_shards, index_shards
from wellfed.data.shards.shard_reader import Bytes, ShardReader, read_into
from wellfed.data.shards.write_shards import write_shards

__all__ = [
    "Bytes",
    "ShardIndex",
    "ShardReader",
    "find_shards",
    "index_shards",
    "read_into",
    "write_shards",
]
