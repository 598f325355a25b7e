"""Certificates for a test: an authority, and what it signs."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kv_transfer.transports.tls import TlsContexts


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFiles:
    """PEM files as `transfer.tls` names them."""

    certificate: Path
    key: Path
    ca: Path

    def contexts(self) -> TlsContexts:
        """As a worker loads them."""
        return TlsContexts.load(certificate=self.certificate, key=self.key, ca=self.ca)


class Authority:
    """Signs certificates, each with a key of its own, into a directory."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        subject = _subject(name)
        unsigned = _builder(subject, subject, self._key.public_key()).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        self._certificate = unsigned.sign(self._key, hashes.SHA256())
        self.path = directory / f"{name}.pem"
        self.path.write_bytes(_pem(self._certificate))

    def issue(self, worker: str) -> CertificateFiles:
        """A worker's certificate, with the authority's behind it, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        unsigned = _builder(_subject(worker), self._certificate.subject, key.public_key())
        certificate = unsigned.sign(self._key, hashes.SHA256())
        paths = CertificateFiles(
            certificate=self._directory / f"{self._name}-{worker}.pem",
            key=self._directory / f"{self._name}-{worker}.key",
            ca=self.path,
        )
        paths.certificate.write_bytes(_pem(certificate) + _pem(self._certificate))
        paths.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return paths


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
