"""Commands that reckon what a model and its traffic need. None of them needs a deployment."""
