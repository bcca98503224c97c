"""Recorded traffic: what a trace says about each request, and the readers of the formats that traces are published in.

The load generator, the simulator and the planner read traces here and nowhere else: `read.read_trace` returns a
`Trace` of `record.TraceRecord`s, and `shape` changes their rate and lengths. A record says how long a prompt is and
which blocks it shares with others, never its text; those who need text or token ids make them from the blocks. The
room knows no model, no client and no clock.
"""
