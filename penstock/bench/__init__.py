"""The load generator: `penstock bench` sends planned requests to any OpenAI-compatible server, or to a deployment's
gRPC address, and reports the latencies and failures its users would have seen.

| room | what it holds |
|---|---|
| `workloads/` | pure plans of requests and their times, from traces, datasets and synthetic mixes |
| `driver/` | sends a plan: endpoints, the open and the closed loop, the generator's own error |
| `results/` | figures of the answers, their file, and comparisons of two files |
| `reports/` | the report as text, and as a self-contained HTML page |

It imports nothing of Penstock outside `penstock/`, and neither torch nor numpy; HTTP needs aiohttp (the extra `bench`).
"""
