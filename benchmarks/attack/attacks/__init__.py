"""The attacks, in one module for each thing that they abuse; `benchmarks.attack.table` lists them.

| module | what it abuses |
|---|---|
| `operators` | ports and calls that are for the deployment's own processes |
| `messages` | bytes that cost more to read, refuse or match than to send |
| `grammars` | grammars that an output must match, and tools |
| `quotas` | work before it is paid for, and tickets |
| `connections` | connections and frames of HTTP/2 |
| `readers` | answers that nobody reads |
| `storms` | many requests at once, and clients that leave |

An attack knows the target's public addresses and the keys that a stranger may have. It does not measure what it costs
others; the harness does.
"""
