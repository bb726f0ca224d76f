"""Stores many small files in a few tar files, and reads any of them again by its place.

Knows tar files in webdataset's layout: what is in them, what is damaged, where each sample's bytes lie; and the folders
of classes that they are made of. Must not know what the bytes mean, torch, or how training works. Start from
`shard_index.index_shards` and `shard_reader.ShardReader`; `write_shards.write_shards` makes them. The names below are
public (docs/public_names.md).
"""

from wellfed.data.shards.shard_index import ShardIndex, find_shards, index_shards
from wellfed.data.shards.shard_reader import Bytes, ShardReader, read_into
from wellfed.data.shards.tar_members import NOT_CLOSED
from wellfed.data.shards.write_shards import write_shards

__all__ = [
    "NOT_CLOSED",
    "Bytes",
    "ShardIndex",
    "ShardReader",
    "find_shards",
    "index_shards",
    "read_into",
    "write_shards",
]
