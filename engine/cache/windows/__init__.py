"""Sliding windows over pages: which pages a token still reads (`page_window`, and `sink_window` with attention sinks),
and where the windowed layers' part of a page is in models that also have other layers (`window_parts`).

Others in `engine.cache` and the schedulers take `PageWindow`, `SinkWindow` and `WindowParts`. Pure
bookkeeping; it must not know hashes, sequences or tensors.
"""
