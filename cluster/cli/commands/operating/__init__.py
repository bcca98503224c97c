"""Commands that change a running deployment: its workers, pools, revision and keys."""
