"""`penstock demo`: run the whole system on this machine for a few seconds.

Starts one prefill worker, two decode workers and a router, streams prompts side by side, prints where the time of each
went, continues a long conversation to show the prefix cache, stops, and checks that no process is left.
"""

from __future__ import annotations

import asyncio
import sys
import textwrap
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from cluster.cli.commands.running.serve import find_model, with_local_model
from cluster.cli.start_progress import StartProgress
from cluster.cli.table import TIMING_HEADER, timing_row
from penstock import AsyncClient
from penstock.charts.table import columns_of, format_table
from penstock.client.results import ChatMessage, GenerateResult, ResultBuilder
from penstock.config import DecodeConfig, PoolConfig, ServeConfig

if TYPE_CHECKING:
    from cluster.ray.launch import RayDeployment

_MAX_TOKENS = 120
_TIMEOUT_S = 60.0
_LINE = 88  # characters a line where the output is not a terminal

_STORY = (
    "There once was a careful boy named Paul. He lived in a small village. Paul had 4 cookies in a basket. He met "
    "Rosa at the bakery. Rosa was hungry. Paul gave 1 of the cookies to Rosa. Now Paul had 3 cookies left. They sat "
    "down and ate together.\n\nThe next day, something new happened. It was Rosa's birthday on Friday. Paul bought a "
    'golden stone for her. To keep it a secret, he hid it in the library. "Come with me," said Paul. When Rosa saw '
    'the stone, she smiled. "It is the best gift of all," said Rosa. It is good to share.'
)


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """A conversation and the name under which its answer is shown."""

    name: str
    messages: list[ChatMessage]


def _chat(*contents: str) -> list[ChatMessage]:
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)]


PROMPTS = (
    DemoPrompt("story", _chat("Can you tell me a story about a goat?")),
    DemoPrompt("question", _chat("Tell me a story about Paul and Rosa.", _STORY, "Where did Paul hide the stone?")),
    DemoPrompt("sum", _chat("What is 12 + 30?")),
    DemoPrompt("sort", _chat("Sort these numbers: 28, 20, 9, 10.")),
    DemoPrompt("about", _chat("What is Penstock?")),
)
# The same conversation one question later: everything before the last turn is in a prefix cache.
FOLLOW_UP = DemoPrompt(
    "question 2",
    _chat(
        *(turn["content"] for turn in PROMPTS[1].messages),
        "Paul hid the stone in the library.",
        "Whose birthday was it?",
    ),
)


class Screen(Protocol):
    """Shows answers as they grow, side by side."""

    def add(self, name: str, text: str) -> None: ...

    def close(self) -> None: ...


class PlainScreen:
    """Prints a line at a time, each with the name of its answer."""

    def __init__(self) -> None:
        self._pending: dict[str, str] = {}

    def add(self, name: str, text: str) -> None:
        held = self._pending.get(name, "") + text.replace("\n", " ")
        while len(held) > _LINE:
            cut = held.rfind(" ", 1, _LINE) + 1 or _LINE
            self._print(name, held[:cut])
            held = held[cut:]
        self._pending[name] = held

    def _print(self, name: str, text: str) -> None:
        print(f"{name:>10} | {text}", flush=True)

    def close(self) -> None:
        for name, text in self._pending.items():
            self._print(name, text)


class LiveScreen:
    """Shows each answer in its own cell of a live table."""

    def __init__(self) -> None:
        from rich.live import Live

        self._texts: dict[str, str] = {}
        self._live = Live(refresh_per_second=15)
        self._live.start()

    def add(self, name: str, text: str) -> None:
        self._texts[name] = self._texts.get(name, "") + text
        self._live.update(self._grid())

    def _grid(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 1))
        grid.add_column(justify="right", style="cyan", no_wrap=True)
        grid.add_column()
        for name, text in self._texts.items():
            grid.add_row(f"{name} |", Text(text))
        return grid

    def close(self) -> None:
        self._live.stop()


def _make_screen() -> Screen:
    return LiveScreen() if sys.stdout.isatty() else PlainScreen()


async def stream_all(address: str, prompts: Sequence[DemoPrompt], screen: Screen) -> list[GenerateResult]:
    """Streams every answer concurrently."""
    async with AsyncClient(address, timeout_s=_TIMEOUT_S) as client:
        return await asyncio.gather(*(_stream(client, prompt, screen) for prompt in prompts))


async def _stream(client: AsyncClient, prompt: DemoPrompt, screen: Screen) -> GenerateResult:
    builder = ResultBuilder()
    async with client.generate(prompt.messages, max_tokens=_MAX_TOKENS, temperature=0.0) as stream:
        async for chunk in stream:
            builder.add(chunk)
            screen.add(prompt.name, chunk.text)
    return builder.result()


def _result_table(prompts: Sequence[DemoPrompt], results: Sequence[GenerateResult]) -> str:
    rows = [
        [
            prompt.name,
            str(result.usage.prompt_tokens),
            str(result.usage.completion_tokens),
            *timing_row(result.timing, result.usage.completion_tokens),
        ]
        for prompt, result in zip(prompts, results, strict=True)
    ]
    header = ("request", "prompt", "output", *TIMING_HEADER)
    return format_table(header, rows, columns_of(sys.stdout), optional=("prefill ms", "queue ms", "output"))


def _show(deployment: RayDeployment) -> None:
    start = deployment.start_up
    print(
        f"ready: Ray {start.ray_s:.1f} s, controller {start.controller_s:.1f} s, workers {start.workers_s:.1f} s, "
        f"first request {start.first_request_s:.1f} s\n"
    )
    for title, prompts in (("Five prompts side by side", PROMPTS), ("The conversation goes on", (FOLLOW_UP,))):
        print(f"{title}\n")
        screen = _make_screen()
        try:
            results = asyncio.run(stream_all(deployment.grpc_address, prompts, screen))
        finally:
            screen.close()
        print(f"\n{_result_table(prompts, results)}\n")
    legend = (
        "TTFT: time to first token. transfer: the part that did not overlap with the prefill. tokens cached: prompt "
        "tokens found in a prefix cache. pages moved: KV pages that the prefill worker wrote into the decode worker."
    )
    print(f"{textwrap.fill(legend, columns_of(sys.stdout) or _LINE)}\n")


def demo_config(model: str) -> ServeConfig:
    """Returns a configuration with free ports that prefills remotely even where local prefill would be faster."""
    return ServeConfig(
        model=model,
        http_port=0,
        grpc_port=0,
        admin_port=0,
        routers=1,
        prefill_pool=PoolConfig(replicas=1),
        decode_pool=PoolConfig(replicas=2),
        decode=DecodeConfig(placement="remote"),
    )


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="penstock-tiny",
        metavar="DIR",
        help="a Hugging Face checkpoint folder or an id of the Hub; default: the bundled one",
    )


def run(arguments: Namespace) -> int:
    """Runs the demo. Returns 1 if a process of the deployment outlives it."""
    import psutil

    from cluster.ray.launch import launch

    config = with_local_model(demo_config(find_model(arguments.model)))
    print("starting 1 prefill worker, 2 decode workers and a router", flush=True)
    with StartProgress() as progress:
        deployment = launch(config, progress.show)
    with deployment:
        _show(deployment)
        processes = deployment.processes()
        began_s = time.monotonic()
    left = [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    if left:
        print(f"penstock: these processes are still running: {left}", file=sys.stderr)
        return 1
    print(f"stopped in {time.monotonic() - began_s:.1f} s; none of {len(processes)} processes is left")
    return 0
