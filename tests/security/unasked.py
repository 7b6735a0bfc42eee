"""What a TCP listener answers to somebody without a key, in the languages that are spoken in a run:
HTTP, gRPC, ZeroMQ and the greeting of ours."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

WAIT_S = 1.0
OPEN = (
    "HTTP 2",
    "gRPC answered",
    "gRPC UNIMPLEMENTED",
    "ZeroMQ NULL",
    "ZeroMQ PLAIN",
)  # how an answer begins that nobody was to get
SILENCE = "nothing"
_ZMQ_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
# a method of each service of Ray's: one without the token must be refused before its arguments are
# looked at
_GRPC_METHODS = (
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "/ray.rpc.ReporterService/GetTraceback",
    "/ray.rpc.MetricsService/ExportMetrics",
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.RayletDriver/ClusterInfo",
)


def answers(addresses: Iterable[str]) -> dict[str, str]:
    """The answer of each HOST:PORT, asked at the same time."""
    asked = sorted(set(addresses))
    with ThreadPoolExecutor(32) as pool:
        return dict(zip(asked, pool.map(answer, asked), strict=True))


def answer(address: str) -> str:
    """What HOST:PORT answers, in words of the protocol that it speaks; `SILENCE` where it says
    nothing in any."""
    host, _, port = address.rpartition(":")
    at = ("127.0.0.1" if host in ("0.0.0.0", "::") else host.removeprefix("::ffff:"), int(port))
    try:
        said, is_open = _said_to(at, _ZMQ_GREETING)
        if said[:1] == b"\xff" and len(said) >= 32:
            return f"ZeroMQ {said[12:32].rstrip(bytes(1)).decode(errors='replace')}"
        if len(said) == 32:
            return "a challenge"
        other, is_open_still = _said_to(at, _HTTP2_PREFACE)
        if other[3:4] == b"\x04":  # a frame of settings
            return _grpc(at)
        return SILENCE if is_open and is_open_still and not said and not other else _http(at)
    except OSError:
        return SILENCE


def _said_to(at: tuple[str, int], words: bytes) -> tuple[bytes, bool]:
    """The first bytes that come back, at most 64, and whether the other end has stayed silent or
    open."""
    said = b""
    with socket.create_connection(at, WAIT_S) as link:
        deadline = time.monotonic() + WAIT_S
        try:
            link.sendall(words)
            while len(said) < 64 and (left := deadline - time.monotonic()) > 0:
                link.settimeout(left)
                if not (part := link.recv(64 - len(said))):
                    return said, False
                said += part
        except TimeoutError:
            pass  # what was said counts
        except OSError:
            return said, False
    return said, True


def _http(at: tuple[str, int]) -> str:
    """The best that any path gives."""
    found = [SILENCE]
    for path in ("/", "/health", "/metrics", "/v1/models"):
        link = http.client.HTTPConnection(*at, timeout=WAIT_S)
        try:
            link.request("GET", path)
            found.append(f"HTTP {link.getresponse().status}")
        except (http.client.HTTPException, OSError):
            continue
        finally:
            link.close()
    return min(found)  # "HTTP 2.." before "HTTP 4.." before "nothing"


def _grpc(at: tuple[str, int]) -> str:
    import grpc

    found = set()
    with grpc.insecure_channel(
        "{}:{}".format(*at), options=[("grpc.enable_http_proxy", 0)]
    ) as channel:
        for method in _GRPC_METHODS:
            try:
                channel.unary_unary(method)(b"", timeout=4 * WAIT_S)
                return f"gRPC answered {method}"
            except grpc.RpcError as error:
                found.add(error.code().name)
    known = found - {"UNIMPLEMENTED"} or found
    return (
        f"gRPC {min(known)}"
        if known <= {"UNAUTHENTICATED", "UNIMPLEMENTED"}
        else f"gRPC answered {min(known)}"
    )
