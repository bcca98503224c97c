"""Tests `penstock upgrade --model` with an id of the Hub, which would be downloaded on one machine only."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from cluster.cli.commands.operating.upgrade import hosts_elsewhere
from cluster.cli.main import main
from penstock.v1 import admin_pb2, admin_pb2_grpc


class TwoMachines(admin_pb2_grpc.AdminServicer):
    """Reports one worker on this machine and one on another."""

    def Status(self, request: admin_pb2.StatusRequest, context: grpc.ServicerContext) -> admin_pb2.StatusResponse:
        addresses = ("127.0.0.1:4001", "192.0.2.7:4002")
        return admin_pb2.StatusResponse(
            workers=[admin_pb2.WorkerStatus(member=admin_pb2.Member(address=address)) for address in addresses]
        )


@pytest.fixture
def admin() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1))
    admin_pb2_grpc.add_AdminServicer_to_server(TwoMachines(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait(5)


def test_a_hub_id_is_refused_if_workers_run_on_other_machines(admin: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["upgrade", "--model", "org/name@v2", "--admin", admin]) == 2
    text = capsys.readouterr().err
    assert "--model: is org/name@v2, which this command downloads on this machine alone" in text
    assert "workers run at 192.0.2.7; " in text
    assert "`hf download org/name --revision v2 --local-dir DIR`" in text


def test_hosts_of_other_machines_are_recognized() -> None:
    assert hosts_elsewhere(["127.0.0.1:1", "localhost:2", ""]) == []
    assert hosts_elsewhere(["127.0.0.1:1", "192.0.2.7:2", "[2001:db8::1]:3"]) == ["192.0.2.7", "2001:db8::1"]
