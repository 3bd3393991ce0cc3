"""The partition of a key, by values of Kafka's own tests (UtilsTest.testMurmur2)."""

from __future__ import annotations

import pytest

from python_jobs.shared.kafka.partitions import murmur2, partition_of

HASHES = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
    b"": 275646681,
}


@pytest.mark.parametrize("key", HASHES)
def test_a_key_has_the_hash_of_java_s_clients(key: bytes) -> None:
    assert murmur2(key) == HASHES[key] & 0xFFFFFFFF


def test_a_partition_is_a_remainder_of_the_positive_hash() -> None:
    assert [partition_of(key, 1000) for key in (b"21", b"abc", b"", None)] == [340, 107, 681, 681]
    assert {partition_of(bytes([n]), 3) for n in range(100)} == {0, 1, 2}
