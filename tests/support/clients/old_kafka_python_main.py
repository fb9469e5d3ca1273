"""Run one client of kafka-python 2.0.2; tests.support.clients.old_kafka_python starts it.

It runs without this project on its path. tests.support.clients.client_process describes its input and output.
Arguments: WHEEL BOOTSTRAP TOPIC API-VERSION.
"""

from __future__ import annotations

import base64
import sys
import zipimport
from importlib.util import module_from_spec
from typing import Any

PATIENCE_S = 60.0


def load_kafka(wheel: str) -> Any:
    """Import the package from the wheel. Its `six` does not find its own parts in Python 3.12 and later."""
    spec = zipimport.zipimporter(f"{wheel}/kafka/vendor").find_spec("six")
    assert spec is not None
    assert spec.loader is not None
    six = module_from_spec(spec)
    spec.loader.exec_module(six)
    sys.modules["kafka.vendor.six"] = six
    sys.modules["kafka.vendor.six.moves"] = six.moves
    sys.path.insert(0, wheel)
    import kafka

    return kafka


def decode(field: str) -> bytes | None:
    return None if field == "-" else base64.b64decode(field[1:])


def main(wheel: str, bootstrap: str, topic: str, api_version: str) -> None:
    kafka = load_kafka(wheel)
    assert kafka.__version__ == "2.0.2", kafka.__version__
    version = tuple(map(int, api_version.split(".")))
    producer = kafka.KafkaProducer(bootstrap_servers=bootstrap, api_version=version, linger_ms=5)
    futures = []
    for line in sys.stdin:
        partition, key, value, *headers = line.split()
        pairs = [(headers[at], decode(headers[at + 1])) for at in range(0, len(headers), 2)]
        where = None if partition == "-" else int(partition)
        futures.append(producer.send(topic, decode(value), decode(key), pairs, where))
    producer.flush(PATIENCE_S)
    print("sent", len(futures))
    for number, future in enumerate(futures):
        try:
            placed = future.get(PATIENCE_S)
        except kafka.errors.KafkaError as error:
            print("error", number, repr(error))
        else:
            print("ack", number, placed.partition, placed.offset)
    producer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
