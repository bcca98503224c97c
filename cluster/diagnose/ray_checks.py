"""Checks of the Ray that this process has: its version, and whether it authenticates callers."""

from __future__ import annotations

import importlib
import os
import stat
import sys
from pathlib import Path

import ray

from cluster.diagnose.findings import Finding, Severity
from cluster.ray.connection import MINIMUM_RAY, check_ray_version
from penstock.errors import ConfigError


def check_ray(subject: str) -> list[Finding]:
    """Checks the Ray of this process: its version, and whether it authenticates callers."""
    return [_check_ray_version(subject), _check_ray_token(subject)]


def _check_ray_version(subject: str) -> Finding:
    python = ".".join(map(str, sys.version_info[:3]))
    try:
        check_ray_version(ray.__version__)
    except ConfigError as error:
        return Finding("ray", subject, Severity.PROBLEM, error.message, f"pip install -U 'ray>={MINIMUM_RAY}'")
    return Finding("ray", subject, Severity.OK, f"{ray.__version__} on Python {python}; every node must have both")


def _check_ray_token(subject: str) -> Finding:
    if ray_requires_token():
        return _check_token_file(subject)
    text = "Ray's ports require no token: anyone who reaches them can run code here"
    advice = (
        "fine where they listen on loopback, as in `penstock serve` without --address; on a cluster run "
        "`ray get-auth-token --generate`, copy ~/.ray/auth_token to every node, and set RAY_AUTH_MODE=token there"
    )
    return Finding("ray token", subject, Severity.WARNING, text, advice)


def _check_token_file(subject: str) -> Finding:
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if "RAY_AUTH_TOKEN" not in os.environ and path.exists() and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        text = f"Ray's ports require a token, which other accounts may read in {path}"
        return Finding("ray token", subject, Severity.PROBLEM, text, f"chmod 600 {path}")
    return Finding("ray token", subject, Severity.OK, "Ray's ports require a token")


def ray_requires_token() -> bool:
    """Returns what Ray itself reports; versions without that interface follow RAY_AUTH_MODE."""
    try:
        raylet = importlib.import_module("ray._raylet")
        return bool(raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN)
    except (ImportError, AttributeError):
        return os.environ.get("RAY_AUTH_MODE") == "token"
