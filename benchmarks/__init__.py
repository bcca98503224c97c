"""Measurements, each a module that is run by itself. Importing the package makes idle threads wait as in a worker."""

import engine  # noqa: F401  # before torch, which reads the setting when it is loaded
