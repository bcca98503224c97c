"""Holds what the schedulers and policies of several folders share: the order of lanes, and costs learned from measured
steps.

Pure: no clock, no I/O.
"""
