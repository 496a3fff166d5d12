"""Which of a host's addresses the others get."""

from __future__ import annotations

import pytest

from weft.api.training.host_agent import HostsRequest
from weft.errors import LaunchError
from weft.run.hosts.network import own_address, own_addresses


def test_the_address_in_a_network() -> None:
    found = own_address("127.0.0.0/8")
    assert (found.address, found.interface) == ("127.0.0.1", "lo")
    assert found in own_addresses()


@pytest.mark.parametrize(
    ("network", "text"),
    [("203.0.113.0/24", r"no address in --network 203.*127.0.0.1 \(lo\)"), ("ten", "'ten' is no network.*10.0.0.0/24")],
)
def test_networks_that_are_none_of_this_host(network: str, text: str) -> None:
    with pytest.raises(LaunchError, match=text):
        own_address(network)


def test_numbers_of_hosts() -> None:
    assert (HostsRequest.of_nodes(4).least, HostsRequest.of_nodes("4").most) == (4, 4)
    assert (HostsRequest.of_nodes("2..4").least, HostsRequest.of_nodes("2..4").most) == (2, 4)


@pytest.mark.parametrize("nodes", ["", "0", "4..2", "2..", "..3", "two", "1-3", "2...4", -1])
def test_what_is_no_number_of_hosts(nodes: str | int) -> None:
    with pytest.raises(LaunchError, match="is no number of hosts. Give one, as 4, or the least and the most: 2..4"):
        HostsRequest.of_nodes(nodes)
