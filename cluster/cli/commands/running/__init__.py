"""Commands that start and end a deployment."""
