"""Provides shared parts of the schedulers and policies of several folders: the order of lanes, costs learned from
measured steps, and the length of prefill workers' queues.

Pure: no clock, no I/O.
"""
