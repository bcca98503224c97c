"""Defines the requests to send and their times. Pure: sources (`recorded`, `mixes`, `datasets`) give drafts, `schedule`
turns them into chains of planned requests, and `prompts` writes the text or the token ids of a planned prompt. Every
plan depends only on its seed; nothing here knows an endpoint or a clock.
"""
