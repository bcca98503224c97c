"""Makes and replaces keys, secrets and certificates as files."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from penstock.config.security import TlsConfig
from penstock.rpc.secret import ClusterSecret, write_private


def write_secret(path: Path, *secrets: ClusterSecret) -> dict[str, object]:
    """Writes a file of cluster secrets, the current one first; returns the `security` table that points to it."""
    write_private(path, "".join(f"{secret.reveal()}\n" for secret in secrets))
    return {"secret_file": str(path)}


def replace(path: Path | str, text: str) -> None:
    """Atomically replaces the file at `path`."""
    beside = Path(f"{path}.new")
    write_private(beside, text)
    os.replace(beside, path)


class Authority:
    """Represents a certificate authority in a folder, made with the openssl program."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self._run("req", "-x509", *self._new_key("ca"), "-out", "ca.pem", "-days", "2", "-subj", "/CN=test authority")
        self.ca = str(folder / "ca.pem")

    def issue(self, name: str, alternatives: str = "") -> TlsConfig:
        extensions = self.folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={alternatives}\n" if alternatives else "basicConstraints=CA:FALSE\n")
        self._run("req", *self._new_key(name), "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signer = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2"]
        self._run("x509", "-req", "-in", f"{name}.csr", *signer, "-extfile", extensions.name, "-out", f"{name}.pem")
        return TlsConfig(cert_file=str(self.folder / f"{name}.pem"), key_file=str(self.folder / f"{name}.key"))

    def _new_key(self, name: str) -> list[str]:
        return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{name}.key"]

    def _run(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True)
