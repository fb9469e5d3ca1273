"""Parse and check the configuration: options, addresses and static tables."""

from kproxy.config.audit import AuditOptions
from kproxy.config.parsing import (
    DEFAULT_ADMIN,
    DEFAULT_LISTEN,
    WILDCARDS,
    Address,
    advertised,
    parse_address,
    parse_writer_groups,
    split_list,
)
from kproxy.config.proxy import (
    DEFAULT_PREFIX,
    OWNERSHIP_SOURCES,
    Limits,
    ProxyConfig,
    Setting,
    build_proxy_config,
    load_proxy_config,
    load_settings,
    share_limits,
)
from kproxy.config.static_table import Owners, TopicOwners, parse_owners

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
