"""Make `rpc.binpb`, the FileDescriptorSet that the etcd client loads, from `rpc.proto`.

    python scripts/etcd_messages.py            write it
    python scripts/etcd_messages.py --check    exit 1 with one sentence if the committed one is out of date

Needs grpcio-tools, a development dependency: users load the committed file. Names for JSON are dropped, so the bytes
depend on the .proto alone and not on the version of the compiler.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2

from kproxy.etcd.messages import DESCRIPTORS

PROTO = DESCRIPTORS.with_name("rpc.proto")


class GenerateError(Exception):
    """One sentence with the reason why there is no descriptor set."""


def _drop_json_names(message: Any) -> None:
    for field in message.field:
        field.ClearField("json_name")
    for nested in message.nested_type:
        _drop_json_names(nested)


def descriptor_set(proto: Path = PROTO) -> bytes:
    """Return the serialized FileDescriptorSet of `proto`. Raise GenerateError if it does not compile."""
    if importlib.util.find_spec("grpc_tools") is None:
        raise GenerateError("grpcio-tools is not installed: run `make install`, which brings what development needs.")
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "out.binpb"
        arguments = [f"-I{proto.parent}", f"--descriptor_set_out={out}", str(proto)]
        command = [sys.executable, "-m", "grpc_tools.protoc", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own arguments
        if done.returncode != 0:
            raise GenerateError(f"{proto.name} does not compile: {done.stderr.strip()}")
        files = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    for file in files.file:
        for message in file.message_type:
            _drop_json_names(message)
    return bytes(files.SerializeToString(deterministic=True))


def main(arguments: Sequence[str]) -> int:
    if list(arguments) not in ([], ["--check"]):
        sys.stderr.write("usage: python scripts/etcd_messages.py [--check]\n")
        return 2
    try:
        wanted = descriptor_set()
    except GenerateError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if not arguments:
        DESCRIPTORS.write_bytes(wanted)
        return 0
    if not DESCRIPTORS.exists() or DESCRIPTORS.read_bytes() != wanted:
        sys.stderr.write(
            f"{DESCRIPTORS.name} does not match {PROTO.name}: "
            "run `python scripts/etcd_messages.py` and commit the result.\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
