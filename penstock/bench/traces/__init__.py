"""Reads recorded traffic: the records of traces, and readers for the formats that traces are published in.

The load generator, the simulator and the planner all read traces here: `read.read_trace` returns a `Trace` of
`record.TraceRecord`s, and `shape` changes their rate and lengths. A record has the length of a prompt and the blocks it
shares with others but never its text; text or token ids are made from the blocks where needed. The room knows no model,
no client and no clock.
"""
