"""Metadata answers read in portions, compared with the decoder that reads them whole."""

from __future__ import annotations

import uuid
from random import Random
from typing import Any

import pytest

from kproxy_codec import api_keys as keys
from kproxy_codec.control import build_response, decode_response, encode_response
from kproxy_codec.errors import CodecError, UnsupportedVersion
from kproxy_codec.metadata import HIGHEST_VERSION, NO_EPOCH, MetadataReader
from tests.support.rules import examples

VERSIONS = range(HIGHEST_VERSION + 1)


def answer(random: Random, version: int) -> bytes:
    """A small answer with rare content: no topics, no brokers, many replicas, long names, racks, errors."""
    brokers = [
        {
            "node_id": random.randrange(2**31),
            "host": "h" * random.choice([0, 1, 126, 127, 300]),
            "port": 9092,
            "rack": rack,
        }
        for rack in random.choices([None, "", "rack"], k=random.randrange(4))
    ]
    topics = []
    for number in range(random.randrange(4)):
        topic: dict[str, Any] = {"error_code": random.choice([0, 3, 5]), "name": f"t{number}" * random.choice([1, 90])}
        if version >= 10:
            topic["topic_id"] = random.choice([None, uuid.UUID(int=random.getrandbits(128))])
        if version >= 12 and random.random() < 0.2:
            topic["name"] = None
        topic["partitions"] = [partition(random, version, index) for index in range(random.choice([0, 1, 5, 130]))]
        topics.append(topic)
    fields: dict[str, Any] = {"brokers": brokers, "topics": topics}
    if version >= 2:
        fields["cluster_id"] = random.choice([None, "", "a3Byb3h5LXRlc3RzLTAwMQ"])
    return encode_response(build_response(keys.METADATA, version, **fields))


def partition(random: Random, version: int, index: int) -> dict[str, Any]:
    made: dict[str, Any] = {"error_code": random.choice([0, 5, 9]), "partition_index": index}
    made["leader_id"] = random.choice([-1, 1, 2**31 - 1])
    if version >= 7:
        made["leader_epoch"] = random.choice([-1, 0, 2**31 - 1])
    made["replica_nodes"] = made["isr_nodes"] = list(range(random.choice([0, 1, 3, 126, 127, 200])))
    return made


def read(body: bytes, version: int, portion: int) -> MetadataReader:
    reader = MetadataReader(memoryview(body), version)
    while not reader.read_some(portion):
        pass
    return reader


@pytest.mark.parametrize("version", VERSIONS)
def test_portions_are_read_as_by_the_other_decoder(version: int) -> None:
    random = Random(version)
    for _ in range(examples(40)):
        body = answer(random, version)
        expected = decode_response(keys.METADATA, version, body)
        reader = read(body, version, random.choice([1, 2, 7, 10_000]))
        assert reader.brokers == [(each.node_id, each.host, each.port) for each in expected.brokers]
        assert reader.cluster_id == (expected.cluster_id if version >= 2 else None)
        assert len(reader.topics) == len(expected.topics)
        for topic, other in zip(reader.topics, expected.topics, strict=True):
            topic_id = other.topic_id if version >= 10 else None
            name = None if other.name is None else other.name.encode()
            assert topic[:3] == (other.error_code, name, topic_id.bytes if topic_id and topic_id.int else None)
            assert list(topic.partitions()) == [
                (each.error_code, each.partition_index, each.leader_id, each.leader_epoch if version >= 7 else NO_EPOCH)
                for each in other.partitions
            ]


@pytest.mark.parametrize("version", VERSIONS)
def test_truncated_or_longer_answer_is_refused(version: int) -> None:
    random = Random(version)
    bodies = (answer(random, version) for _ in range(100))
    body = next(each for each in bodies if 200 < len(each) < 3_000)
    read(body, version, 10)
    for wrong in [*(body[:end] for end in range(len(body))), body + b"\x00"]:
        with pytest.raises(CodecError):
            read(wrong, version, 10)


@pytest.mark.parametrize("version", VERSIONS)
def test_damaged_answers_are_refused_or_read(version: int) -> None:
    random = Random(version)
    for _ in range(examples(100)):
        body = bytearray(answer(random, version))
        for _ in range(random.randrange(1, 4)):
            body[random.randrange(len(body))] = random.choice([0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)])
        try:
            read(bytes(body), version, 1_000)
        except CodecError:
            continue


def test_version_that_is_not_read_is_refused() -> None:
    for version in (-1, HIGHEST_VERSION + 1):
        with pytest.raises(UnsupportedVersion):
            MetadataReader(b"", version)
