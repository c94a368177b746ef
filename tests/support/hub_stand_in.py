"""A stand-in for the Hugging Face hub: as much of its HTTP interface as huggingface_hub 2 needs to upload a model.

It is no hub. It knows one user, keeps repositories in memory and checks less than the real one; that the real one takes what we
send, no test here can show. What it speaks is what huggingface_hub's own client sends: whoami, creating a repository and a
branch, the pre-upload question, git-LFS's batch and upload, and the commit as lines of JSON. Weights go by LFS, all else inline.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml
from huggingface_hub import constants

from psigrad.language.data import named_datasets

USER, TOKEN = "ada", "hf_a_token_that_writes"


@dataclass
class Repository:
    """Files of each branch, and the summaries of its commits."""

    private: bool = False
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    commits: list[str] = field(default_factory=list)


@dataclass
class HubStandIn:
    """What the server holds and was asked; `fail` makes the requests whose path has this text answer 500."""

    address: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    fail: str = ""

    def answer(self, method: str, path: str, body: bytes, token: str) -> tuple[int, Any]:
        """(status, JSON) of a request."""
        self.asked.append(f"{method} {path}")
        if self.fail and self.fail in path:
            return 500, {"error": "out of order"}
        if method == "PUT" and path.startswith("/objects/"):  # the address is signed in the real one: no token
            oid = path.removeprefix("/objects/")
            if hashlib.sha256(body).hexdigest() != oid:
                return 400, {"error": "the content has another hash"}
            self.objects[oid] = body
            return 200, {}
        if token != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid credentials in Authorization header"}
        if path == "/api/whoami-v2":
            return 200, {"type": "user", "name": USER, "orgs": []}
        if path == "/api/validate-yaml":
            front = yaml.safe_load(json.loads(body)["content"].split("---")[1])
            return 200, {"errors": [] if isinstance(front, dict) else [{"message": "no metadata"}], "warnings": []}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path.endswith(".git/info/lfs/objects/batch"):
            return 200, {"transfer": "basic", "objects": [self._action(one) for one in json.loads(body)["objects"]]}
        if path.startswith("/api/models/"):
            owner, name, *rest = path.removeprefix("/api/models/").split("/")
            return self._of_repository(f"{owner}/{name}", [unquote(part) for part in rest], body)
        return 404, {"error": "there is no such address"}

    def _create(self, given: dict[str, Any]) -> tuple[int, Any]:
        owner = given.get("organization") or USER
        name = f"{owner}/{given['name']}"
        if owner != USER:
            return 403, {"error": f"You don't have the rights to create a model under the namespace {owner!r}"}
        taken = name in self.repositories
        if not taken:
            self.repositories[name] = Repository(given.get("private") or given.get("visibility") == "private")
        return (409 if taken else 200), {"url": f"{self.address}/{name}", "error": "You already created this model repo"}

    def _action(self, one: dict[str, Any]) -> dict[str, Any]:
        upload = {"upload": {"href": f"{self.address}/objects/{one['oid']}"}}
        return one if one["oid"] in self.objects else {**one, "actions": upload}

    def _of_repository(self, name: str, rest: list[str], body: bytes) -> tuple[int, Any]:
        if name not in self.repositories:
            return 404, {"error": "Repository not found"}
        held = self.repositories[name]
        if not name.startswith(f"{USER}/") and rest[:1] not in ([], ["tree"], ["revision"]):
            return 403, {"error": "You are not allowed to write to this repository"}
        if not rest or rest[0] == "revision":
            return 200, {"id": name, "private": held.private, "sha": "0" * 40, "siblings": [], "tags": []}
        kind, branch = rest[0], rest[1]
        if kind == "branch":
            taken = branch in held.branches
            held.branches.setdefault(branch, dict(held.branches["main"]))
            return (409 if taken else 200), {}
        if branch not in held.branches:
            return 404, {"error": f"Invalid rev id: {branch}"}
        files = held.branches[branch]
        if kind == "tree":
            return 200, [{"type": "file", "path": p, "size": len(c), "oid": _git(c)} for p, c in files.items()]
        if kind == "preupload":
            return 200, {"files": [_mode(one, files) for one in json.loads(body)["files"]]}
        return self._commit(name, held, files, [json.loads(line) for line in body.splitlines() if line])

    def _commit(self, name: str, held: Repository, files: dict[str, bytes], lines: list[dict[str, Any]]) -> tuple[int, Any]:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                held.commits.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        sha = f"{len(held.commits):040x}"
        return 200, {"success": True, "commitOid": sha, "commitUrl": f"{self.address}/{name}/commit/{sha}"}


def _mode(one: dict[str, Any], files: dict[str, bytes]) -> dict[str, Any]:
    there = files.get(one["path"])
    lfs = one["path"].endswith(".safetensors")
    oid = None if there is None else hashlib.sha256(there).hexdigest() if lfs else _git(there)
    return {"path": one["path"], "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False, "oid": oid}


def _git(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def reach(monkeypatch, address: str) -> None:
    """Let this process ask the hub at `address`, with the token that writes."""
    for name, value in {"ENDPOINT": address, "HF_HUB_DISABLE_XET": True, "HF_HUB_OFFLINE": False}.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)


def network(monkeypatch, there: bool, **proxies: str) -> None:
    """Find the address of a host only if the network is `there`. `proxies` are the system's."""

    def look_up(*given):
        if not there:
            raise socket.gaierror(-2, "Name or service not known")
        return [given]

    monkeypatch.setattr("urllib.request.getproxies", lambda: proxies)
    monkeypatch.setattr("socket.getaddrinfo", look_up)


def cut_off(monkeypatch) -> None:
    """Be without a network, which nobody has noticed yet."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(named_datasets, "_network", {"missing": False})
    network(monkeypatch, there=False)


@contextlib.contextmanager
def hub_stand_in() -> Iterator[HubStandIn]:
    """The server on a port of this machine, for the length of the block."""
    hub = HubStandIn()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self._body()
            status, said = hub.answer(self.command, urlsplit(self.path).path, body, self.headers.get("Authorization", ""))
            content = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = answer

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
