"""Serves files and offline batches over HTTP, and answers the lines of batches.

Others use `parts.OfflineParts` and `line_answers.LineAnswers`. `router.batches` decides what is stored and when
batches run.
"""
