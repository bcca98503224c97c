"""The `penstock` command. Exit status: 0 done, 2 a problem that the message names, 130 after Ctrl-C."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from cluster import change_commands, commands, operations, plan_command
from cluster.terminal import StartProgress, changes, how_to_call
from penstock import log
from penstock.config import ServeConfig, parse, read
from penstock.errors import ConfigError, PenstockError
from penstock.types import Lane

if TYPE_CHECKING:
    from cluster.launch import OnStatus, RayDeployment

PROBLEM = 2


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    log.set_up("penstock")
    try:
        return int(arguments.run(arguments))
    except PenstockError as error:
        print(f"penstock: {error.message}", file=sys.stderr)
        return PROBLEM
    except KeyboardInterrupt:
        return commands.INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left; nothing more to say
        return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="penstock", description="Serve a language model, or call one that is served.")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(subparsers.add_parser("serve", help="start a deployment and keep it up"))
    for name, run, text in (
        ("generate", commands.generate, "stream an answer to the terminal"),
        ("chat", commands.chat, "talk with the model"),
    ):
        _add_client(subparsers.add_parser(name, help=text), name, run)
    status = subparsers.add_parser("status", help="show the workers and what they do")
    status.add_argument("--json", action="store_true", help="print the whole answer as JSON")
    status.add_argument("--wait", type=float, metavar="SECONDS", help="until every worker is ready")
    stop = subparsers.add_parser("stop", help="end the deployment")
    drain = subparsers.add_parser("drain", help="empty a worker, or all of a node, and end it; streams go on elsewhere")
    drain.add_argument("worker", nargs="?", help="as `penstock status` names it, such as decode-1")
    drain.add_argument("--node", help="all workers of a node that goes: its Ray id, its address or its host's name")
    drain.add_argument("--within", type=float, metavar="SECONDS", help="until the node goes; default: no hurry")
    drain.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="default: %(default)s")
    drain.add_argument("--replace", action="store_true", help="start a new worker in its place")
    drain.add_argument("--json", action="store_true", help="print each step as a line of JSON")
    for one, command in (
        (status, commands.status),
        (stop, commands.stop),
        (drain, commands.drain),
        *operations.add_parsers(subparsers),
        *change_commands.add_parsers(subparsers),
    ):
        admin = os.environ.get("PENSTOCK_ADMIN", "localhost:50052")
        one.add_argument(
            "--admin", default=admin, metavar="HOST:PORT", help="default: $PENSTOCK_ADMIN, else port 50052"
        )
        one.add_argument("--secret-file", metavar="FILE", help="the deployment's secret, where another account runs it")
        _add_tls(one)
        one.set_defaults(run=command)
    plan_command.add_parser(subparsers)
    key = subparsers.add_parser("key", help="make API keys for tenants")
    new = key.add_subparsers(required=True, metavar="COMMAND").add_parser("new", help="make one and show it, once")
    new.add_argument("tenant", help="the tenant's name in the configuration")
    new.set_defaults(run=commands.new_key)
    return parser


def _add_serve(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", metavar="DIR", help="a Hugging Face checkpoint folder")
    add("--config", metavar="FILE", help="TOML or JSON with more settings; flags win over it")
    add("--prefill", type=int, metavar="N", help="prefill workers; default 1")
    add("--decode", type=int, metavar="M", help="decode workers; default 1")
    add("--prefill-tp", type=int, metavar="N", help="processes, or GPUs, that share each prefill worker; default 1")
    add("--decode-tp", type=int, metavar="N", help="likewise of each decode worker")
    add("--colocated", action="store_true", help="no prefill workers: decode workers prefill too")
    add("--host", help="address of the HTTP and gRPC ports; default 127.0.0.1")
    add("--http-port", type=int, metavar="PORT", help="default 8000; 0 takes a free one")
    add("--grpc-port", type=int, metavar="PORT", help="default 50051; 0 takes a free one")
    add("--admin-port", type=int, metavar="PORT", help="default 50052; 0 takes a free one; always on loopback")
    add("--address", help="a Ray cluster to join, such as auto; default: start one here")
    add("--lookaside", action="store_true", default=None, help="decode workers stream to clients that ask for it")
    add("--dtype", help="auto, bfloat16, float16 or float32")
    add("--transport", help="how KV pages travel: auto, cuda_ipc or shm (one host), nixl or torch")
    parser.set_defaults(run=serve)


def _add_tls(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tls", action="store_true", help="encrypt, and trust the authorities that gRPC knows")
    add("--ca", metavar="FILE", help="encrypt, and trust this authority (PEM)")
    add("--cert", metavar="FILE", help="a client certificate to show (PEM), with --cert-key")
    add("--cert-key", metavar="FILE", help="its key (PEM)")
    add("--server-name", metavar="NAME", help="in the server's certificate, where it is not the host that is called")


def _add_client(parser: argparse.ArgumentParser, name: str, run: object) -> None:
    add = parser.add_argument
    if name == "generate":
        add("prompt", help="the prompt; - reads it from standard input")
        add("--timing", action="store_true", help="print where the time went")
        add("--explain", action="store_true", help="print why its workers were chosen, and what that was to cost")
    else:
        add("--system", metavar="TEXT", help="a system message to begin with")
    server = os.environ.get("PENSTOCK_SERVER", "localhost:50051")
    add("--server", default=server, metavar="HOST:PORT", help="or $PENSTOCK_SERVER; default: %(default)s")
    add("--api-key", metavar="KEY", help="default: $PENSTOCK_API_KEY, which other users of the machine cannot read")
    _add_tls(parser)
    add("--lookaside", action="store_true", help="read the answer at its decode worker, if the deployment lets you")
    add("--timeout", type=float, metavar="SECONDS", help="of one answer")
    add("--lane", choices=[lane.value for lane in Lane], help="what it competes with; default: the caller's own")
    add("--max-tokens", type=int, metavar="N")
    add("--temperature", type=float, metavar="T", help="0 is greedy")
    add("--top-p", type=float, metavar="P")
    add("--top-k", type=int, metavar="K")
    add("--seed", type=int)
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    parser.set_defaults(run=run)


def serve_config(arguments: argparse.Namespace) -> ServeConfig:
    """The config file's values with the flags over them. Raises ConfigError."""
    data = read(arguments.config) if arguments.config else {}
    for key in ("model", "host", "http_port", "grpc_port", "admin_port", "address", "lookaside"):
        _set(data, (key,), getattr(arguments, key))
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
        raise ConfigError("model is missing: give --model DIR, a Hugging Face checkpoint folder")
    return parse(ServeConfig, data, source=arguments.config or "penstock serve")


def _set(data: dict[str, object], path: tuple[str, ...], value: object) -> None:
    if value is None:
        return
    table = data
    for key in path[:-1]:
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            return  # the file is wrong there, and validation says so
        table = inner
    table[path[-1]] = value


def serve(arguments: argparse.Namespace) -> int:
    config = serve_config(arguments)
    launch = _import_launch()
    told: list[int] = []  # signals: SIGTERM lets streams end, Ctrl-C does not wait, nor does a second SIGTERM

    def take(number: int, frame: object) -> None:
        told.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, take)
    try:
        with StartProgress() as progress:
            deployment = launch(config, progress.show)
    except (KeyboardInterrupt, SystemExit):  # the latter is how Ray, while it starts, takes a SIGTERM
        return commands.INTERRUPTED
    try:
        config = deployment.config
        endpoints = {
            "http": deployment.http_address,
            "grpc": deployment.grpc_address,
            "admin": deployment.admin_address,
        }
        pools = f"{config.prefill_pool.replicas} prefill + {config.decode_pool.replicas} decode workers"
        print(f"ready: {config.model_name}, {pools}\n\n{_how_to_call(config, endpoints)}\n", flush=True)
        if config.address:
            deployment.leave()
            print("It runs in the Ray cluster from now on; `penstock stop` ends it.")
            return 0
        print("Ctrl-C stops it.", flush=True)
        states = {worker.member.worker_id: worker.state for worker in deployment.status().workers}
        deployment.wait_until_stopped(lambda status: _print_lines(changes(states, status)))
    except KeyboardInterrupt:
        print("stopping", file=sys.stderr)
    finally:
        deployment.stop(config.drain_s if told else 0.0)
    return 0


def _how_to_call(config: ServeConfig, endpoints: Mapping[str, str]) -> str:
    return how_to_call(config.model_name, endpoints, encrypted=config.tls is not None, keyed=bool(config.tenants))


def _print_lines(lines: Sequence[str]) -> None:
    for line in lines:
        print(line, file=sys.stderr, flush=True)


def _import_launch() -> Callable[[ServeConfig, OnStatus], RayDeployment]:
    """Ray and the worker's libraries are an extra: the other commands do without."""
    try:
        from cluster.launch import launch
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; run: pip install 'penstock[serve]'") from error
    return launch


if __name__ == "__main__":
    sys.exit(main())
