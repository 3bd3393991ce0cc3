"""The partition of a key, as Kafka's Java clients choose it, for producers that have to know it before they send."""

from __future__ import annotations

_M, _MASK = 0x5BD1E995, 0xFFFFFFFF


def partition_of(key: bytes | None, partitions: int) -> int:
    """Return the partition of a key; records without a key have one partition, that of the empty key."""
    return (murmur2(key or b"") & 0x7FFFFFFF) % partitions


def murmur2(data: bytes) -> int:
    """Return the 32-bit hash that Kafka's default partitioner uses."""
    size = len(data)
    found = (0x9747B28C ^ size) & _MASK
    for place in range(0, size - size % 4, 4):
        part = int.from_bytes(data[place : place + 4], "little") * _M & _MASK
        part = (part ^ part >> 24) * _M & _MASK
        found = (found * _M & _MASK) ^ part
    if size % 4:
        found ^= int.from_bytes(data[size - size % 4 :], "little")
        found = found * _M & _MASK
    found = (found ^ found >> 13) * _M & _MASK
    return found ^ found >> 15
