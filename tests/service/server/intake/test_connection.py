import socket

import pytest

from radixkv.service.server.intake.connection import close_connections


@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
def test_the_connection_of_a_peer_is_closed_and_no_other(family):
    host = "127.0.0.1" if family == "ipv4" else "::1"
    try:
        listener = socket.create_server((host, 0), family=socket.AF_INET if family == "ipv4" else socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no such address")
    with listener:
        address = listener.getsockname()[:2]
        with socket.create_connection(address) as bad, socket.create_connection(address) as good:
            to_bad, to_good = listener.accept()[0], listener.accept()[0]
            shown = host if family == "ipv4" else "%5B::1%5D"
            num_closed = close_connections({f"{family}:{shown}:{bad.getsockname()[1]}"})
            to_good.sendall(b"still here")
            assert num_closed == 1
            assert bad.recv(10) == b""
            assert good.recv(10) == b"still here"
            to_bad.close()
            to_good.close()


def test_a_peer_that_has_gone_is_no_error():
    assert close_connections({"ipv4:127.0.0.1:1", "unix:"}) == 0


def test_a_peer_of_ipv4_is_found_on_a_socket_of_both_families():
    """gRPC listens on such sockets, and names the peer without the prefix that the socket gives it."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no such sockets")
    with (
        socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener,
        socket.create_connection(("127.0.0.1", listener.getsockname()[1])) as caller,
        listener.accept()[0],
    ):
        assert close_connections({f"ipv4:127.0.0.1:{caller.getsockname()[1]}"}) == 1
        assert caller.recv(10) == b""
