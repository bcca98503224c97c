"""Shared parts of the schedulers and policies of several folders: the order of lanes, and costs learned from measured
steps.

Pure: no clock, no I/O.
"""
