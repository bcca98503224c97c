"""Of the Ray that this process has: its version, and whether it asks callers for a token."""

from __future__ import annotations

import importlib
import os
import sys

import ray

from cluster.findings import Finding, Verdict
from cluster.ray_cluster import MINIMUM_RAY, check_ray_version
from penstock.errors import ConfigError


def examine_ray(subject: str) -> list[Finding]:
    return [_version(subject), _authentication(subject)]


def _version(subject: str) -> Finding:
    python = ".".join(map(str, sys.version_info[:3]))
    try:
        check_ray_version(ray.__version__)
    except ConfigError as error:
        return Finding("ray", subject, Verdict.PROBLEM, error.message, f"pip install -U 'ray>={MINIMUM_RAY}'")
    return Finding("ray", subject, Verdict.OK, f"{ray.__version__} on Python {python}; every node must have both")


def _authentication(subject: str) -> Finding:
    if token_mode():
        return Finding("ray token", subject, Verdict.OK, "Ray's ports ask for a token")
    text = "Ray's ports ask for no token: whoever reaches them runs code here"
    advice = (
        "fine where they listen on loopback, as in `penstock serve` without --address; on a cluster run "
        "`ray get-auth-token --generate`, copy ~/.ray/auth_token to every node, and set RAY_AUTH_MODE=token there"
    )
    return Finding("ray token", subject, Verdict.WARNING, text, advice)


def token_mode() -> bool:
    """As Ray itself sees it; versions that do not say go by the variable."""
    try:
        raylet = importlib.import_module("ray._raylet")
        return bool(raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN)
    except (ImportError, AttributeError):
        return os.environ.get("RAY_AUTH_MODE") == "token"
