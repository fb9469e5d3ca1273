"""The table of APIs: it is complete, and the code and the documentation agree with it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from kproxy.proxy.api_versions import BrokerApis, offer
from kproxy.proxy.apis import APIS, NOT_SERVED, REQUEST_KEY_TYPES, SERVED, Handling, api_of, proxy_ranges
from kproxy.proxy.client_session import _PARTITIONED
from kproxy_codec import api_keys as keys
from kproxy_codec import cluster, control, coordination, fetch, list_offsets, produce
from kproxy_codec.control import version_range

REPOSITORY = Path(__file__).parents[3]
NAMED = {value for name, value in vars(keys).items() if name.isupper() and isinstance(value, int)}
SASL = {keys.SASL_HANDSHAKE, keys.SASL_AUTHENTICATE}
NATIVE = {keys.OWN, keys.INIT_PRODUCER_ID, keys.FIND_COORDINATOR}


def keys_of(*handlings: Handling) -> set[int]:
    return {key for key, api in APIS.items() if api.handling in handlings}


def test_every_named_api_key_has_a_row() -> None:
    """Every API that the code handles or refuses by name has a row."""
    assert set(APIS) == NAMED - {keys.NEVER_FLEXIBLE}


def test_code_handles_every_row_of_the_table() -> None:
    assert keys_of(Handling.SPLIT) == set(_PARTITIONED)
    named = {*cluster.RENAMED, keys.FIND_COORDINATOR, keys.LIST_CONFIG_RESOURCES}
    assert {key for key, api in APIS.items() if api.names_brokers} == named
    assert keys_of(*REQUEST_KEY_TYPES) >= coordination.TELL_ERRORS | coordination.COMMIT_EPOCH_FROM.keys()
    assert keys_of(Handling.PROXY) == {keys.API_VERSIONS, keys.OWN, *SASL}
    assert {key for key, api in APIS.items() if api.ends_here is not None} == NATIVE | SASL


@pytest.mark.parametrize("can_answer", [(), (keys.OWN,), tuple(SASL)])
def test_versions_follow_the_table_before_brokers_answer(can_answer: tuple[int, ...]) -> None:
    everything = BrokerApis(dict.fromkeys(range(1 << 15), (0, 1 << 10)))
    ranges = {key: APIS[key].versions for key in can_answer}
    offered = offer([everything], can_answer=ranges).ranges
    left_out = {keys.OWN, *SASL} - set(can_answer)
    assert offered == {key: api.versions for key, api in SERVED.items() if key not in left_out}
    assert offer([], can_answer=ranges).ranges == offered


def test_refused_api_is_not_offered_or_permitted() -> None:
    for key, api in APIS.items():
        if api.handling is Handling.REFUSED:
            assert api.versions == NOT_SERVED
            assert not api.needs
            assert key not in proxy_ranges()


def test_every_resource_api_needs_a_permission() -> None:
    # Undecided: with ACLs nobody may, but the proxy answers these itself.
    assert {key for key, api in SERVED.items() if api.needs is None} == {keys.API_VERSIONS, *SASL}
    telemetry = {keys.GET_TELEMETRY_SUBSCRIPTIONS, keys.PUSH_TELEMETRY}
    assert {key for key, api in SERVED.items() if api.needs == ()} == {keys.DESCRIBE_CLUSTER, *telemetry}


def test_divided_api_names_its_parts() -> None:
    for key, api in [*SERVED.items(), (keys.OFFSET_FETCH, api_of(keys.OFFSET_FETCH, 8))]:
        if api.is_divided:
            at, to = api.parts
            assert to in control.response_fields(key)
            assert at or api.handling is Handling.ALL_BROKERS


def test_codec_reads_every_version_of_the_table() -> None:
    # Produce 0 to 2 are offered and not read: with a higher minimum librdkafka drops gzip and lz4.
    read = {
        keys.PRODUCE: (0, produce.MAX_VERSION),
        keys.FETCH: (fetch.MIN_VERSION, fetch.MAX_VERSION),
        keys.LIST_OFFSETS: (list_offsets.MIN_VERSION, list_offsets.MAX_VERSION),
    }
    # Telemetry is passed on unread.
    for key in SERVED.keys() - {keys.OWN, keys.GET_TELEMETRY_SUBSCRIPTIONS, keys.PUSH_TELEMETRY}:
        lowest, highest = read.get(key) or version_range(key)
        assert lowest <= SERVED[key].min_version <= SERVED[key].max_version <= highest


def test_request_that_changes_something_is_not_repeated() -> None:
    words = ("CREATE_", "DELETE_", "ALTER_", "INCREMENTAL_", "UPDATE_", "ELECT_")
    changes = {key for key in SERVED if keys.name_of(key).startswith(words)} | {keys.OWN, *SASL}
    assert {key for key, api in APIS.items() if not api.repeatable} == changes


def test_page_names_every_api_once_with_versions() -> None:
    spec = importlib.util.spec_from_file_location("protocol_support", REPOSITORY / "scripts/protocol_support.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = script.PAGE.read_text()
    assert page == "\n".join(script.lines()) + "\n", "run make docs"
    for key, api in APIS.items():
        if api.handling is Handling.REFUSED:
            assert page.count(f"- {script.kafka_name(key)} ({key})") == 1
        else:
            assert page.count(f"| {script.kafka_name(key)} | {key} | {api.min_version}") == 1
