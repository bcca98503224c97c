"""The routes of files and of offline batches, and how a batch's line is answered.

Others take `add_files` and `add_batches`; what is stored and what runs when is decided in `router.batches`.
"""
