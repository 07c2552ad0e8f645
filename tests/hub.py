"""A hub on loopback: it knows one token, keeps what is committed, and serves models and data sets."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_right"


class Hub(BaseHTTPRequestHandler):
    """Files of small and large models alike travel in the commit."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]
    created: list[dict[str, Any]]
    repos: dict[str, dict[str, dict[str, bytes]]]
    """What it serves: by name (``acme/tiny``, ``datasets/acme/sums``) and revision, contents by path."""
    asked: list[str]
    """Paths of requests."""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.asked.append(path)
        if path == "/api/whoami-v2":
            self._answer({"name": "ann", "type": "user", "orgs": []})
        elif about := re.fullmatch(r"/api/(?:models/)?(.+?)(?:/(revision|tree)/([^/]+)(?:/(.+))?)?", path):
            name, folder = about[1], f"{about[4]}/" if about[4] else ""
            if (files := self._revision(name, about[3] or "main")) is None:
                return
            entries = [_entry(each, content) for each, content in files[1].items() if each.startswith(folder)]
            if about[2] != "tree":
                siblings = [{"rfilename": entry["path"]} for entry in entries]
                name = name.removeprefix("datasets/")
                self._answer({"id": name, "sha": files[0], "siblings": siblings, "tags": [], "private": False})
            elif "recursive=true" in self.path.lower():
                self._answer(entries)
            else:
                inner = {
                    each["path"][len(folder) :].partition("/")[0]
                    for each in entries
                    if "/" in each["path"][len(folder) :]
                }
                folders = [
                    {"type": "directory", "path": folder + each, "oid": "0", "size": 0} for each in sorted(inner)
                ]
                self._answer([*folders, *(each for each in entries if "/" not in each["path"][len(folder) :])])
        elif found := re.fullmatch(r"/(.+)/resolve/([^/]+)/(.+)", path):
            self._file(*found.groups())
        else:
            self._answer({"error": "no such page"}, 404)

    do_HEAD = do_GET

    def _revision(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Return commit and files of a revision, which may be named by its commit; answer if there is none."""
        revisions = self.repos.get(name, {})
        by_commit = {hashlib.sha1(f"{name}@{each}".encode()).hexdigest(): each for each in revisions}
        known = by_commit.get(revision, revision)
        if known not in revisions:
            code = "RevisionNotFound" if revisions else "RepoNotFound"
            self._answer({"error": code}, 404, {"X-Error-Code": code})
            return None
        return next(commit for commit, each in by_commit.items() if each == known), revisions[known]

    def _file(self, name: str, revision: str, path: str) -> None:
        """Answer with a file, or the part of it that is asked for."""
        if (files := self._revision(name, revision)) is None:
            return
        if path not in files[1]:
            return self._answer({"error": "EntryNotFound"}, 404, {"X-Error-Code": "EntryNotFound"})
        content, headers = files[1][path], {"X-Repo-Commit": files[0], "Accept-Ranges": "bytes"}
        headers["ETag"] = f'"{_digest(content)}"'
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if part is not None and self.command == "GET":
            first, last = int(part[1]), min(int(part[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            return self._send(content[first : last + 1], 206, headers)
        self._send(content, 200, headers)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            self.created.append(asked := json.loads(body))
            name = f"{asked.get('organization') or 'ann'}/{asked['name']}"
            self._answer({"url": f"http://{self.headers['Host']}/{name}", "name": name, "id": name})
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
            self._answer({"files": modes})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            at = f"http://{self.headers['Host']}/{self.path.split('/', 3)[3].replace('/commit/main', '/commit/0')}"
            self._answer({"success": True, "commitOid": "0", "commitUrl": at, "hookOutput": ""})
        elif self.path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif asked := re.fullmatch(r"/api/(?:models/)?(.+)/paths-info/([^/]+)", unquote(self.path)):
            if (files := self._revision(*asked.groups())) is not None:
                paths = json.loads(body)["paths"] if body[:1] == b"{" else parse_qs(body.decode())["paths"]
                self._answer([_entry(path, files[1][path]) for path in paths if path in files[1]])
        else:
            self._answer({}, 404)

    def _answer(self, body: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            body, status = {"error": "Invalid username or password."}, 401
        self._send(json.dumps(body).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def _send(self, content: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


def _digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(path: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "oid": _digest(content), "size": len(content)}


@contextlib.contextmanager
def hub() -> Iterator[tuple[str, type[Hub]]]:
    """Give the hub's address, and what it keeps."""
    kept = type("Kept", (Hub,), {"files": {}, "created": [], "repos": {}, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kept)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", kept
    finally:
        server.shutdown()
        server.server_close()
