"""Commands that show what a running deployment does, and why."""
