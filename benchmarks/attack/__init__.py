"""Attacks a running deployment and measures what each attack costs the router and its other callers (`make attack`,
`make soak`).

`python -m benchmarks.attack` starts `penstock serve` with the bundled model and runs the attacks of `table.py` one by
one; `python -m benchmarks.attack.soak` runs faults, slow readers, bad input and cancellations at the same time for half
an hour and looks for growth. `docs/security.md` names each attack of the table, and a test keeps the two equal.

| module | what it holds |
|---|---|
| `attacks` | the attacks, by what they abuse |
| `table` | all of them by name |
| `target` | the deployment: its processes, ports, keys |
| `witness` | a separate process that times ordinary streams and probes the router |
| `sockets`, `http2_frames` | connections that misbehave as no client library lets them |
| `verdict`, `growth` | pure: decide whether an attack was withstood, and whether something grew |

An attack is a function that takes the target. It returns if the deployment behaved and raises `Breach` otherwise; the
harness measures what it costs others. Raw connections come from a separate address, 127.0.0.66, so that limits by peer
distinguish them from other callers. Attacks reach the deployment only through its sockets.
"""
