"""The `penstock` command line.

Each module of `commands/` is one command; adding a file there adds the command. `main` builds the parser and maps
errors to exit statuses, `options` holds flags that several commands share, `admin` calls the Admin service. Others take
`cluster.cli.main.main` only. A command knows the public client and the Admin service, never a controller or a worker.
"""
