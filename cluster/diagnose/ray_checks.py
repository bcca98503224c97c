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
    """Checks the Ray that this process belongs to: its version, and whether it authenticates callers."""
    return [_check_ray_version(subject), _check_ray_token(subject)]


def check_installed_ray(subject: str) -> list[Finding]:
    """Checks the Ray that a new process here would use: its version, and who may read its token.

    Whether a running Ray asks for the token is for its own processes to say: an embedded one does although nothing in
    this process's environment shows it.
    """
    return [_check_ray_version(subject), _check_token_file(subject)]


def _check_ray_version(subject: str) -> Finding:
    python = ".".join(map(str, sys.version_info[:3]))
    try:
        check_ray_version(ray.__version__)
    except ConfigError as error:
        return Finding("ray", subject, Severity.PROBLEM, error.message, f"pip install -U 'ray>={MINIMUM_RAY}'")
    return Finding("ray", subject, Severity.OK, f"{ray.__version__} on Python {python}; every node must have both")


def _check_ray_token(subject: str) -> Finding:
    if ray_requires_token():
        found = _check_token_file(subject)
        if found.severity is Severity.PROBLEM:
            return found
        return Finding("ray token", subject, Severity.OK, "Ray's ports require a token")
    text = "Ray's ports require no token: anyone who reaches them can run code here"
    advice = (
        "fine where they listen on loopback, as in `penstock serve` without --address; on a cluster run "
        "`ray get-auth-token --generate`, copy ~/.ray/auth_token to every node, and set RAY_AUTH_MODE=token there"
    )
    return Finding("ray token", subject, Severity.WARNING, text, advice)


def _check_token_file(subject: str) -> Finding:
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if "RAY_AUTH_TOKEN" in os.environ:
        return Finding("ray token", subject, Severity.OK, "read from RAY_AUTH_TOKEN")
    if not path.exists():
        text = f"none in {path} yet; `penstock serve` makes one for the Ray that it embeds"
        return Finding("ray token", subject, Severity.SKIPPED, text)
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        text = f"other accounts may read Ray's token in {path}"
        return Finding("ray token", subject, Severity.PROBLEM, text, f"chmod 600 {path}")
    return Finding("ray token", subject, Severity.OK, f"only this account reads {path}")


def ray_requires_token() -> bool:
    """Returns what Ray itself reports; versions without that interface follow RAY_AUTH_MODE."""
    try:
        raylet = importlib.import_module("ray._raylet")
        return bool(raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN)
    except (ImportError, AttributeError):
        return os.environ.get("RAY_AUTH_MODE") == "token"
