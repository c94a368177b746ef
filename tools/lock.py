"""What psigrad is installed with, locked: requirements.lock with hashes, THIRD_PARTY_NOTICES.md and sbom.cdx.json.

    python tools/lock.py            notices and bill of materials, from the installed packages
    python tools/lock.py --hashes   the lock too, by uv from constraints.txt and the package index

The lock holds the hashes of every file that PyPI has of each version, and of torch those of the builds without CUDA: it is for
CPUs. On Linux torch then comes from https://download.pytorch.org/whl/cpu.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import urllib.request
import uuid
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS, LOCK = ROOT / "constraints.txt", ROOT / "supply" / "requirements.lock"
NOTICES, SBOM = ROOT / "supply" / "THIRD_PARTY_NOTICES.md", ROOT / "supply" / "sbom.cdx.json"
# torch 2.13.0+cpu for Linux on x86-64 and Python 3.11, from https://download.pytorch.org/whl/cpu
TORCH_CPU = "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"
# Software that is part of this repository, with its licence beside it.
VENDORED = (
    ("marked", "18.2.1", "MIT", "https://github.com/markedjs/marked"),
    ("temml", "0.13.5", "MIT", "https://github.com/ronkok/Temml"),
    ("uPlot", "1.6.32", "MIT", "https://github.com/leeoniya/uPlot"),
)


@dataclass(frozen=True)
class Package:
    """One third-party package."""

    name: str
    version: str
    licence: str
    home: str
    hashes: tuple[str, ...] = ()
    """The SHA-256 of every file that may be installed of it."""


def pinned(text: str) -> dict[str, str]:
    """Name (normalised) -> version of each line "name==version"."""
    found = re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;\\]+)", text, re.MULTILINE)
    return {normalised(name): version for name, version in found}


def normalised(name: str) -> str:
    """A package's name as indexes spell it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def write_lock() -> None:
    """requirements.lock from constraints.txt."""
    command = ["uv", "pip", "compile", "--no-deps", "--generate-hashes", "--no-header", "--no-annotate", "--quiet"]
    made = subprocess.run([*command, str(CONSTRAINTS)], check=True, capture_output=True, text=True).stdout
    head = "# Made by `make lock` from constraints.txt. Install: pip install --require-hashes --no-deps -r supply/requirements.lock\n"  # noqa: E501
    torch = re.search(r"^torch==(\S+) \\\n(?:    --hash=\S+(?: \\)?\n)+", made, re.MULTILINE)
    assert torch is not None
    entry = " \\\n".join([f"torch=={torch[1]}", *(f"    --hash=sha256:{value}" for value in cpu_builds(torch[1]))])
    LOCK.write_text(f"{head}{made[: torch.start()]}{entry}\n{made[torch.end() :]}")


def cpu_builds(version: str) -> list[str]:
    """The hashes of torch's builds without CUDA: PyPI's for macOS and Windows, and the CPU index's. Those with CUDA need packages
    that are not locked.
    """
    request = urllib.request.Request("https://pypi.org/simple/torch/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        files = json.load(answer)["files"]
    found = [f for f in files if f["filename"].startswith(f"torch-{version}-") and "linux" not in f["filename"]]
    return sorted([TORCH_CPU, *(f["hashes"]["sha256"] for f in found)])


def packages() -> list[Package]:
    """The locked packages that are installed, and what is vendored."""
    found = [Package(*parts) for parts in VENDORED]
    text = LOCK.read_text()
    for name, version in pinned(text).items():
        try:
            data = distribution(name)
        except PackageNotFoundError:
            continue  # of another platform
        entry = re.search(rf"^{name}==.*\n(?:    --hash=.*\n)+", text, re.MULTILINE | re.IGNORECASE)
        hashes = re.findall(r"sha256:([0-9a-f]{64})", entry[0]) if entry else []
        found.append(Package(name, version, licence_of(data), home_of(data), tuple(hashes)))
    return sorted(found, key=lambda package: package.name)


def licence_of(data: Distribution) -> str:
    """The licence that a package's metadata names: its expression, its classifiers, or its first words."""
    meta = data.metadata
    if (expression := meta.get("License-Expression")) and str(expression).strip():
        return str(expression)
    named = [c.rpartition(" :: ")[2] for c in meta.get_all("Classifier") or [] if c.startswith("License ::")]
    if named := [name for name in named if name != "OSI Approved"]:
        return ", ".join(named)
    text = str(meta.get("License") or "").strip().splitlines()
    return text[0][:60] if text and text[0].strip() else "see its home page"


def home_of(data: Distribution) -> str:
    """A package's home page."""
    urls = [line.split(", ", 1) for line in data.metadata.get_all("Project-URL") or []]
    named = {label.lower(): url for label, url in (u for u in urls if len(u) == 2)}
    page = next((named[k] for k in ("homepage", "home", "repository", "source", "source code", "github") if k in named), "")
    return page or str(data.metadata.get("Home-page") or "") or f"https://pypi.org/project/{data.metadata['Name']}/"


def notices(found: list[Package]) -> str:
    """THIRD_PARTY_NOTICES.md."""
    rows = "\n".join(f"| {p.name} | {p.version} | {p.licence.replace('|', '/')} | {p.home} |" for p in found)
    return (
        "# Third-party notices\n\n"
        "psigrad is installed with these packages, each under its own licence. `make lock` makes this page from their metadata; "
        "the full texts come with the packages.\n\n"
        f"| package | version | licence | home page |\n|---|---|---|---|\n{rows}\n"
    )


def bill_of_materials(found: list[Package]) -> str:
    """sbom.cdx.json: CycloneDX 1.6."""
    components = [
        {
            "type": "library",
            "bom-ref": f"pkg:pypi/{p.name}@{p.version}",
            "name": p.name,
            "version": p.version,
            "purl": f"pkg:pypi/{p.name}@{p.version}",
            "hashes": [{"alg": "SHA-256", "content": value} for value in p.hashes],
            "licenses": [{"license": {"name": p.licence}}],
            "externalReferences": [{"type": "website", "url": p.home}],
        }
        for p in found
    ]
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    content = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(components))}",
        "version": 1,
        "metadata": {"component": {"type": "library", "name": "psigrad", "version": version[1]}},
        "components": components,
    }
    return json.dumps(content, indent=1) + "\n"


def main() -> int:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hashes", action="store_true")
    if parser.parse_args().hashes:
        write_lock()
    found = packages()
    NOTICES.write_text(notices(found))
    SBOM.write_text(bill_of_materials(found))
    print(f"{len(found)} packages: {LOCK.name}, {NOTICES.name}, {SBOM.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
