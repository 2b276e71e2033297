"""Addresses: IPv4, IPv6 with brackets and scopes, names; which family a socket needs; what is bound is reached."""

import asyncio
import ipaddress
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.errors import ConfigError
from flowrt.net.link import ClientLink, ServerLink, check_free
from flowrt.protocol import messages as m
from flowrt.runtime.addresses import Endpoint, is_loopback, needs_ipv6, parse_address, split_endpoint, unmapped
from flowrt.runtime.host import _inet6_addresses, check_address, interface_of, local_address, reachable
from tests.effort import examples

HOSTS = st.one_of(
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
    st.ip_addresses(v=6, network=ipaddress.ip_network("fe80::/64")).map(lambda address: f"{address}%eth0"),
    st.from_regex(r"[a-z][a-z0-9.-]{0,20}", fullmatch=True),
)


@settings(max_examples=examples(60))
@given(HOSTS, st.integers(0, 65535))
def test_an_endpoint_is_read_as_it_was_written(host: str, port: int) -> None:
    endpoint = Endpoint(host, port)
    assert split_endpoint(str(endpoint)) == endpoint
    assert parse_address(endpoint.address) == endpoint
    assert str(endpoint).startswith("[") == (":" in host)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        "host:",
        ":5",
        "host:70000",
        "::1:5555",
        "[::1]",
        "[host]:5",
        "[127.0.0.1]:5",
        "a b:5",
        "h:5:6",
        "h:-1",
    ],
)
def test_a_malformed_endpoint_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        split_endpoint(text)
    with pytest.raises(ConfigError, match=r"tcp://HOST:PORT.*tcp://\[::1\]:0"):
        parse_address(f"tcp://{text}")


def test_a_loopback_address_needs_no_keys() -> None:
    for host in ("127.0.0.1", "127.1.2.3", "[::1]", "localhost"):
        check_address(f"tcp://{host}:0", keyed=False)
    for host in ("*", "0.0.0.0", "[::]", "[2001:db8::1]", "[fe80::1%eth0]", "host"):
        check_address(f"tcp://{host}:0", keyed=True)
        with pytest.raises(ConfigError, match="there are no keys"):
            check_address(f"tcp://{host}:0", keyed=False)


def test_the_family_of_a_socket() -> None:
    assert not any(needs_ipv6(host) for host in ("127.0.0.1", "0.0.0.0", "localhost", "10.1.2.3"))
    assert all(needs_ipv6(host) for host in ("::1", "::", "*", "2001:db8::1", "nowhere.invalid"))


def test_addresses_in_their_usual_form() -> None:
    assert unmapped("::ffff:10.0.0.1") == "10.0.0.1"
    assert unmapped("0:0:0:0:0:0:0:1") == "::1"
    assert unmapped("host") == "host"
    assert is_loopback("::1")


def test_an_ipv6_wildcard_is_published_in_brackets() -> None:
    for bound in ("tcp://[::]:4567", "tcp://*:4567"):
        assert reachable(bound, "2001:db8::7") == "tcp://[2001:db8::7]:4567"
        assert reachable(bound, "[2001:db8::7]") == "tcp://[2001:db8::7]:4567"
    assert reachable("tcp://[::1]:4567", "head") == "tcp://[::1]:4567"
    assert local_address("tcp://[::1]:4567") == "::1"
    assert interface_of("::1") == interface_of("127.0.0.1") == "lo"


def test_an_address_of_one_link_is_named_with_its_interface() -> None:
    """Without it a worker could not listen there."""
    addresses = [(name, own) for name, own in _inet6_addresses(link_local=True) if own.startswith("fe80:")]
    if not addresses:
        pytest.skip("no interface of this host has a link-local address")
    [(name, own), *_] = addresses
    assert local_address(f"tcp://[{own}%{name}]:4567") == f"{own}%{name}"
    assert interface_of(f"{own}%{name}") == name
    assert interface_of(f"{own}%another") == ""


@pytest.mark.parametrize("address", ["tcp://[2001:db8::1]:0", "tcp://192.0.2.1:0", "tcp://[fe80::1]:0"])
def test_an_address_of_another_host_is_refused_by_name(address: str) -> None:
    with pytest.raises(ConfigError, match=rf"{re.escape(address)} cannot be bound \(.*its host is no address of this"):
        check_free(address, keyed=True)


@pytest.mark.parametrize("bound", ["tcp://[::1]:0", "tcp://127.0.0.1:0", "tcp://localhost:0"])
async def test_a_controller_is_reached_where_it_listens(bound: str) -> None:
    check_free(bound, keyed=False)
    received: asyncio.Future[m.Message] = asyncio.get_running_loop().create_future()
    server = ServerLink(
        on_message=lambda _, message: received.set_result(message), on_invalid=print, on_closed=lambda: None
    )
    address = server.bind(bound)
    assert parse_address(address).port
    client = ClientLink(print, print)
    client.connect(address)
    client.send(m.Hello(protocol=1, worker="a", role="b", host="c", pid=1, lanes=()))
    try:
        assert isinstance(await asyncio.wait_for(received, 30.0), m.Hello)
        peer = server.filter.address(server.source())
        assert split_endpoint(peer).host == ("::1" if "::1" in bound else "127.0.0.1")
    finally:
        client.close()
        server.close()
