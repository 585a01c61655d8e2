"""The wheel's build adds a software bill of materials: CycloneDX 1.6, ``*.dist-info/sboms/dropmax.cdx.json``.

A wheel holds no other package. The bill lists what installing it with the pinned versions brings, required or by an
extra, from ``dependencies.json``. The same sources give the same bytes: it has no time stamp, and its number is made of
its content.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class SbomHook(BuildHookInterface):  # type: ignore[type-arg]
    """Makes the bill before the wheel is put together, and removes it from disk afterwards."""

    _folder: str | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the bill where hatchling will fetch it."""
        locked = json.loads((Path(self.root) / "dependencies.json").read_text(encoding="utf-8"))
        self._folder = tempfile.mkdtemp(prefix="dropmax-sbom-")
        path = Path(self._folder) / "dropmax.cdx.json"
        path.write_text(json.dumps(make_sbom(self.metadata.version, locked), indent=1) + "\n", encoding="utf-8")
        build_data["sbom_files"].append(str(path))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Clear away."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def make_sbom(version: str, locked: dict[str, Any]) -> dict[str, Any]:
    """Return the bill for a version of dropmax and the packages of a lock."""
    shipped = [one for one in locked["packages"] if one["scope"] != "development"]
    purls = {one["name"]: f"pkg:pypi/{one['name']}@{one['version']}" for one in shipped}
    needs = {one["name"]: [purls[need] for need in one["requires"] if need in purls] for one in shipped}
    ours = f"pkg:pypi/dropmax@{version}"
    direct = [purls[name] for name in locked["requires"]]
    content: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "lifecycles": [{"phase": "build"}],
            "component": {
                "type": "library",
                "bom-ref": ours,
                "name": "dropmax",
                "version": version,
                "purl": ours,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            },
            "properties": [{"name": "dropmax:hashes-of", "value": f"wheels for {locked['wheels_for']}"}],
        },
        "components": [
            {
                "type": "library",
                "bom-ref": purls[one["name"]],
                "name": one["name"],
                "version": one["version"],
                "scope": one["scope"],
                "hashes": [{"alg": "SHA-256", "content": one["sha256"]}],
                "licenses": [{"expression": one["licence"]}],
                "purl": purls[one["name"]],
            }
            for one in shipped
        ],
        "dependencies": [
            {"ref": ours, "dependsOn": direct},
            *({"ref": purls[name], "dependsOn": needs[name]} for name in purls),
        ],
    }
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(content, sort_keys=True))
    return {**content, "serialNumber": f"urn:uuid:{number}"}
