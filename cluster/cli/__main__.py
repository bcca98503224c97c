"""`python -m cluster.cli`: the `penstock` command where the package is not installed."""

from __future__ import annotations

import sys

from cluster.cli.main import main

sys.exit(main())
