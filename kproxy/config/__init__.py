"""What the commands are told: options, addresses, static tables; read and checked."""

from kproxy.config.address import (
    DEFAULT_ADMIN,
    DEFAULT_LISTEN,
    WILDCARDS,
    Address,
    advertised,
    parse_address,
    split_list,
)
from kproxy.config.audit import AuditOptions
from kproxy.config.limits import Limits
from kproxy.config.owners import Owners, TopicOwners, parse_owners
from kproxy.config.proxy import (
    DEFAULT_PREFIX,
    OWNERSHIP_SOURCES,
    ProxyConfig,
    Setting,
    build_proxy_config,
    load_proxy_config,
    load_settings,
)
from kproxy.config.workers import share_limits
from kproxy.config.writer_groups import parse_writer_groups

__all__ = [
    "DEFAULT_ADMIN",
    "DEFAULT_LISTEN",
    "DEFAULT_PREFIX",
    "OWNERSHIP_SOURCES",
    "WILDCARDS",
    "Address",
    "AuditOptions",
    "Limits",
    "Owners",
    "ProxyConfig",
    "Setting",
    "TopicOwners",
    "advertised",
    "build_proxy_config",
    "load_proxy_config",
    "load_settings",
    "parse_address",
    "parse_owners",
    "parse_writer_groups",
    "share_limits",
    "split_list",
]
