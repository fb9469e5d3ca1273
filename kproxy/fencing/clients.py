"""The former place of `kproxy.claims.client`; importable until the next release."""

from __future__ import annotations

import warnings

from kproxy.claims.client import *  # noqa: F403 - whatever is public there

warnings.warn("kproxy.fencing.clients has moved: import kproxy.claims.client", DeprecationWarning, stacklevel=2)
