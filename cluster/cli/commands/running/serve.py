"""`penstock serve`: start a deployment and keep it up."""

from __future__ import annotations

import signal
import socket
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from cluster.cli.start_progress import StartProgress
from cluster.cli.table import state_changes
from penstock.config import ServeConfig, parse, read
from penstock.errors import ConfigError, Unavailable
from penstock.rpc.addresses import is_every_interface
from penstock.v1 import admin_pb2

if TYPE_CHECKING:
    from cluster.ray.launch import RayDeployment, RayLost

ModelT = TypeVar("ModelT")  # a config file may give anything, which validation reports

_INTERRUPTED = 130
MAX_LOSSES = 3
WITHIN_S = 600.0
BUNDLED_MODEL = Path(__file__).resolve().parents[4] / "models" / "penstock-tiny"


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model",
        metavar="DIR",
        help="a Hugging Face checkpoint folder; an id of the Hub (ORG/NAME or ORG/NAME@REVISION), which is downloaded; "
        "or penstock-tiny: the bundled one",
    )
    add("--config", metavar="FILE", help="TOML or JSON with more settings; flags override it")
    add("--prefill", type=int, metavar="N", help="prefill workers; default 1")
    add("--decode", type=int, metavar="M", help="decode workers; default 1")
    add("--prefill-tp", type=int, metavar="N", help="ranks (processes or GPUs) of each prefill worker; default 1")
    add("--decode-tp", type=int, metavar="N", help="ranks of each decode worker; default 1")
    add("--colocated", action="store_true", help="no prefill workers: decode workers prefill too")
    add("--host", help="address of the HTTP and gRPC ports; default 127.0.0.1")
    add("--http-port", type=int, metavar="PORT", help="default 8000; 0 takes a free one")
    add("--grpc-port", type=int, metavar="PORT", help="default 50051; 0 takes a free one")
    add("--admin-port", type=int, metavar="PORT", help="default 50052; 0 takes a free one")
    add(
        "--admin-host",
        metavar="HOST",
        help="address of the Admin service beside loopback, for routers elsewhere; default 127.0.0.1",
    )
    add("--routers", type=int, metavar="N", help="router processes; default 2; with 0 they are started elsewhere")
    add("--address", metavar="HOST:PORT", help="a Ray cluster to join, such as auto; default: start one here")
    add(
        "--attach",
        action="store_true",
        help="follow the deployment that already runs in the Ray cluster, if there is one",
    )
    add("--secret-file", metavar="FILE", help="the cluster secret, at this path on every node; needed with --address")
    add("--lookaside", action="store_true", default=None, help="decode workers stream to clients that ask for it")
    add("--dtype", metavar="TYPE", help="of weights and KV pages: auto, bfloat16, float16 or float32")
    add("--transport", metavar="NAME", help="how KV pages travel: auto, cuda_ipc or shm (one host), nixl or torch")


@dataclass(frozen=True, slots=True)
class _Loss:
    """The end of a deployment whose embedded Ray was lost, and the configuration to start it again with."""

    reason: str
    config: ServeConfig


def run(arguments: Namespace) -> int:
    config = serve_config(arguments)
    if arguments.attach and not config.address:
        raise ConfigError("--attach: a Ray started here has no deployment yet; give --address too")
    config = with_local_model(config)
    signals: list[int] = []  # after SIGTERM streams may finish; Ctrl-C and a second SIGTERM end them

    def on_sigterm(number: int, frame: object) -> None:
        signals.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, on_sigterm)
    losses_s: list[float] = []
    while isinstance(end := _serve_until_lost(config, arguments.attach, signals), _Loss):
        losses_s.append(time.monotonic())
        if not may_restart(losses_s, losses_s[-1]):
            raise Unavailable(f"Ray was lost {len(losses_s)} times in a row, the last time: {end.reason}; see its logs")
        config = end.config
        print("starting again, at the same ports", file=sys.stderr, flush=True)
    return end


def _serve_until_lost(config: ServeConfig, attach: bool, signals: list[int]) -> int | _Loss:
    """Starts a deployment and returns the exit status once it has ended, or the loss of the Ray that it started."""
    launch, ray_lost = _import_launch()
    started_s = time.monotonic()
    try:
        with StartProgress() as progress:
            deployment = launch(config, progress.show, attach=attach)
    except (KeyboardInterrupt, SystemExit):  # Ray raises SystemExit for a SIGTERM while it starts
        return _INTERRUPTED
    except ray_lost as error:
        print(f"Ray is lost before the deployment was ready: {error.message}", file=sys.stderr, flush=True)
        return _Loss(error.message, config)
    grace_s = 0.0
    try:
        _print_ready(deployment, time.monotonic() - started_s)
        if config.address:
            deployment.leave()
            print("It runs in the Ray cluster from now on; `penstock stop` ends it.")
            return 0
        print("Ctrl-C stops it.", flush=True)
        states = {worker.member.worker_id: worker.state for worker in deployment.status().workers}
        lost = deployment.wait_until_stopped(partial(_print_changes, states))
        if not lost:
            return 0
        grace_s = config.drain_s
        print(f"Ray is lost: {lost}. Requests in flight have {grace_s:g} s to finish.", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("stopping", file=sys.stderr)
        return 0
    finally:
        deployment.stop(config.drain_s if signals else grace_s)
    # Its ports are the ones that callers know. A secret that it generated for itself ended with it.
    return _Loss(lost, deployment.config.model_copy(update={"security": config.security}))


def serve_config(arguments: Namespace) -> ServeConfig:
    """Returns the config file's values overridden by the flags. Raises ConfigError."""
    data = read(arguments.config) if arguments.config else {}
    ports = ("http_port", "grpc_port", "admin_host", "admin_port")
    for key in ("model", "host", *ports, "routers", "address", "lookaside"):
        _set(data, (key,), getattr(arguments, key))
    _set(data, ("security", "secret_file"), arguments.secret_file)
    _set(data, ("engine", "dtype"), arguments.dtype)
    _set(data, ("transfer", "transport"), arguments.transport)
    if arguments.colocated and arguments.prefill:
        raise ConfigError(f"--colocated with --prefill {arguments.prefill}: it has no prefill workers; leave one out")
    _set(data, ("prefill_pool", "replicas"), 0 if arguments.colocated else arguments.prefill)
    _set(data, ("decode_pool", "replicas"), arguments.decode)
    _set(data, ("prefill_pool", "engine", "tensor_parallel"), arguments.prefill_tp)
    _set(data, ("decode_pool", "engine", "tensor_parallel"), arguments.decode_tp)
    _set(data, ("decode", "placement"), "local" if arguments.colocated else None)
    if "model" not in data:
        raise ConfigError(
            "model is missing: give --model DIR, a Hugging Face checkpoint folder; the bundled one is penstock-tiny"
        )
    data["model"] = find_model(data["model"])
    return parse(ServeConfig, data, source=arguments.config or "penstock serve")


def find_model(model: ModelT) -> ModelT | str:
    """Returns the folder of the bundled model for its name, unless there is a folder of that name here."""
    is_bundled = model == BUNDLED_MODEL.name and not Path(BUNDLED_MODEL.name).exists()
    return str(BUNDLED_MODEL) if is_bundled else model


def with_local_model(config: ServeConfig) -> ServeConfig:
    """Returns the configuration with the folder of its model, which is downloaded if it is an id of the Hub.

    Clients know such a model by its id. Raises ConfigError on a Ray cluster, whose other nodes have no such folder.
    """
    from engine.weights.hub import HubModel

    found = HubModel.parse(config.model)
    if found is None:
        return config
    if config.address:
        raise ConfigError(
            f"model = {config.model!r}: with address, every node needs the folder at the same path; run `hf download "
            f"{found.repo} --local-dir DIR` on shared storage, and give DIR"
        )
    print(f"fetching {found} from the Hugging Face Hub", file=sys.stderr, flush=True)
    return config.model_copy(update={"model": str(found.fetch()), "served_model": config.served_model or found.repo})


def _set(data: dict[str, object], path: tuple[str, ...], value: object) -> None:
    if value is None:
        return
    table = data
    for key in path[:-1]:
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            return  # the file is wrong here; validation reports it
        table = inner
    table[path[-1]] = value


def _import_launch() -> tuple[Callable[..., RayDeployment], type[RayLost]]:
    """Imports Ray and the workers' libraries, which the other commands do without."""
    from cluster.ray.launch import RayLost, launch

    return launch, RayLost


def _print_ready(deployment: RayDeployment, took_s: float) -> None:
    config = deployment.config
    endpoints = {"http": deployment.http_address, "grpc": deployment.grpc_address, "admin": deployment.admin_address}
    num_workers = (
        f"{config.prefill_pool.replicas} prefill + {config.decode_pool.replicas} decode workers, in {took_s:.0f} s"
    )
    if not config.routers:
        usage = how_to_follow(deployment.admin_address, config.admin_host)
        print(f"ready: {config.model_name}, {num_workers}, no router of its own\n\n{usage}\n", flush=True)
        return
    keyed = bool(config.tenants or config.tenants_file)
    usage = how_to_call(config.model_name, endpoints, encrypted=config.tls is not None, keyed=keyed)
    print(f"ready: {config.model_name}, {num_workers}\n\n{usage}\n", flush=True)


def _print_changes(states: dict[str, str], status: admin_pb2.StatusResponse) -> None:
    for line in state_changes(states, status):
        print(line, file=sys.stderr, flush=True)


def how_to_follow(admin: str, host: str) -> str:
    """Returns what the operator of a deployment without routers does next: `admin` is where this machine calls its
    Admin service, which listens on `host`."""
    address = f"{socket.gethostname() if is_every_interface(host) else host}:{admin.rpartition(':')[2]}"
    return f"""\
  admin  {admin}

  No request was sent through it: its routers are started elsewhere, each by `python -m router --config FILE`
  with admin = "{address}", the cluster secret, and the address of its own machine (--peer-host).

  penstock status --admin {admin}"""


def how_to_call(model: str, endpoints: Mapping[str, str], *, encrypted: bool = False, keyed: bool = False) -> str:
    """Returns commands that a person can type next. `endpoints` holds host:port of http, grpc and admin.

    Callers with API keys (`keyed`) have theirs in PENSTOCK_API_KEY, which the clients read themselves.
    """
    url, tls = f"http{'s' * encrypted}://{endpoints['http']}", "--tls " * encrypted
    client = f'"{endpoints["grpc"]}"' + ", tls=ClientTls()" * encrypted
    imports = "from penstock import Client" + "; from penstock.client.auth import ClientTls" * encrypted
    header = ' -H "Authorization: Bearer $PENSTOCK_API_KEY"' * keyed
    body = f'{{"model": "{model}", "prompt": "Once upon a time", "max_tokens": 40}}'
    return f"""\
  HTTP   {url}/v1   (OpenAI's API)
  gRPC   {endpoints["grpc"]}   (penstock.v1.Inference, with reflection)
  admin  {endpoints["admin"]}

  penstock generate {tls}--server {endpoints["grpc"]} "Once upon a time"
  penstock status --admin {endpoints["admin"]}
  python -c '{imports}; print(Client({client}).complete("Once upon a time").text)'
  curl {url}/v1/completions{header} -H 'Content-Type: application/json' -d '{body}'"""


def may_restart(losses_s: Sequence[float], now_s: float) -> bool:
    """Decides whether a deployment whose Ray was lost is started again: not after repeated losses, whose cause remains.

    `losses_s` are the times of all losses, the current one included. Pure.
    """
    return sum(now_s - lost_s < WITHIN_S for lost_s in losses_s) <= MAX_LOSSES
