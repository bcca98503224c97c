"""Commands that estimate what a model and its traffic need. None of them needs a deployment."""
