"""Stands between Ray and the workers that the fork server makes for it. `forked_ray_workers` installs it.

Ray's node manager starts this file as it would start a worker. It asks the server for a fork that becomes the worker,
and lives as long as the fork does. If it is killed, the worker ends with it, so that ending all descendants of a node
manager ends its workers too. Ray itself talks to the worker and kills it by its own id.

The worker's own command line, parent and initial environment are the server's; tests of those need fresh processes.
This file imports only small modules of Python, because each worker pays for its start.
"""

import argparse
import json
import os
import signal
import socket
import sys

SOCKET = "PENSTOCK_TESTS_FORK_RAY_WORKERS"
_MAX_ANSWER_BYTES = 4096


def main() -> None:
    """Asks for a fork that becomes the worker of this process's arguments, and ends when that does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    parser.add_argument("script")
    known, arguments = parser.parse_known_args()
    environment = {**os.environ, **json.loads(known.serialized_runtime_env_context).get("env_vars", {})}
    request = {"code": known.script, "arguments": arguments, "environment": environment, "folder": os.getcwd()}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(environment[SOCKET])
        socket.send_fds(server, [json.dumps(request).encode()], [1, 2])
        answer = server.recv(_MAX_ANSWER_BYTES)
    status = json.loads(answer)["status"] if answer else -signal.SIGKILL
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
