"""The compiled frame reader and request queue pass the tests of their Python twins in the codec."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kproxy.plain import compiled
from tests.property import test_codec_framing as random_framing
from tests.property.test_codec_framing import *  # noqa: F403 -- the same tests again
from tests.unit.codec import test_correlation as correlation
from tests.unit.codec import test_framing as framing
from tests.unit.codec.test_correlation import *  # noqa: F403 -- the same tests again
from tests.unit.codec.test_framing import *  # noqa: F403 -- the same tests again

pytestmark = pytest.mark.skipif(compiled is None, reason="the plain path is not compiled here")


@pytest.fixture(autouse=True, scope="module")
def compiled_classes() -> Iterator[None]:
    """Let the tests find the compiled classes under the names of their twins."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (framing, correlation, random_framing):
            for name in ("AwaitedAnswers", "FrameReader", "ReceiveArena"):
                if hasattr(module, name):
                    patch.setattr(module, name, getattr(compiled, name))
        yield


def test_classes_under_test_are_the_compiled_ones() -> None:
    assert compiled is not None
    assert framing.FrameReader is random_framing.FrameReader is correlation.FrameReader is compiled.FrameReader
    assert correlation.AwaitedAnswers is compiled.AwaitedAnswers
