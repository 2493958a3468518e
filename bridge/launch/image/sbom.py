"""What is in an image, as CycloneDX 1.6. Pure: the same image gives the same text."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from bridge import __version__
from bridge.launch.image.locks import Entry


def cyclonedx(
    *,
    name: str,
    digest: str,
    time: str,
    base: str,
    base_digest: str,
    python: Sequence[Entry],
    debian: Sequence[Mapping[str, str]],
    distribution: str,
) -> dict[str, Any]:
    """The bill of materials of one image.

    A Python package has the hashes of all files that its lock allows; one of them was installed.

    Args:
        digest, base_digest: `sha256:…`.
        time: when the image was made, in UTC.
        python: the lock that was installed.
        debian: the fields of dpkg's status file, one mapping for each package.
        distribution: `debian` or `ubuntu`.
    """
    base_component = {
        "type": "container",
        "bom-ref": "base",
        "name": base.partition("@")[0],
        "version": base_digest,
        "hashes": [_hash(base_digest.removeprefix("sha256:"))],
    }
    components = [base_component, *map(_python, python), *(_debian(fields, distribution) for fields in debian)]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'{name}@{digest}')}",
        "version": 1,
        "metadata": {
            "timestamp": time,
            "tools": {"components": [{"type": "application", "name": "bridge-rl", "version": __version__}]},
            "component": {
                "type": "container",
                "bom-ref": "image",
                "name": name,
                "version": digest,
                "hashes": [_hash(digest.removeprefix("sha256:"))],
            },
        },
        "components": components,
        "dependencies": [{"ref": "image", "dependsOn": [str(part["bom-ref"]) for part in components]}],
    }


def _hash(value: str) -> dict[str, str]:
    return {"alg": "SHA-256", "content": value}


def _python(entry: Entry) -> dict[str, Any]:
    purl = f"pkg:pypi/{entry.name}@{quote(entry.version, safe='')}"
    return {
        "type": "library",
        "bom-ref": purl,
        "name": entry.name,
        "version": entry.version,
        "purl": purl,
        "hashes": [_hash(value) for value in sorted(entry.hashes)],
    }


def _debian(fields: Mapping[str, str], distribution: str) -> dict[str, Any]:
    name, version, architecture = fields["Package"], fields["Version"], fields["Architecture"]
    purl = f"pkg:deb/{distribution}/{quote(name, safe='')}@{quote(version, safe=':')}?arch={architecture}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
