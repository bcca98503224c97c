"""Commands that call the model of a running deployment."""
