"""Defines what is sent and when. Pure: sources (`recorded`, `mixes`, `datasets`) give drafts, `schedule` makes chains
of planned requests of them, and `prompts` writes the text or the token ids of a planned prompt. Everything depends on
its seed alone; nothing here knows an endpoint or a clock."""
