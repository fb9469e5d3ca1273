"""The committed descriptors match the committed .proto, and stale descriptors are noticed."""

from pathlib import Path

import pytest

from kproxy.etcd.messages import DESCRIPTORS, rpc
from scripts import etcd_messages as generate


def test_committed_descriptors_are_up_to_date() -> None:
    assert generate.main(["--check"]) == 0


def test_stale_descriptor_set_fails_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = tmp_path / "rpc.proto"
    changed.write_text(generate.PROTO.read_text().replace("int64 mod_revision = 3;", "int64 mod_revision = 30;"))
    stale = tmp_path / "rpc.binpb"
    monkeypatch.setattr(generate, "PROTO", changed)
    monkeypatch.setattr(generate, "descriptor_set", lambda: original(changed))
    monkeypatch.setattr(generate, "DESCRIPTORS", stale)
    assert generate.main(["--check"]) == 1
    stale.write_bytes(DESCRIPTORS.read_bytes())
    assert generate.main(["--check"]) == 1
    assert "python scripts/etcd_messages.py" in capsys.readouterr().err
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0


def test_uncompilable_proto_is_reported(tmp_path: Path) -> None:
    broken = tmp_path / "broken.proto"
    broken.write_text("message {")
    with pytest.raises(generate.GenerateError, match=r"broken\.proto does not compile"):
        generate.descriptor_set(broken)


def test_unknown_arguments_are_refused() -> None:
    assert generate.main(["--chek"]) == 2


def test_messages_are_not_in_the_shared_pool() -> None:
    from google.protobuf import descriptor_pool

    assert rpc.PutRequest.DESCRIPTOR.full_name == "etcdserverpb.PutRequest"
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindMessageTypeByName("etcdserverpb.PutRequest")


original = generate.descriptor_set
