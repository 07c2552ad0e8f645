"""A hub of models on loopback: it knows one token, and keeps what is committed."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_right"


class Hub(BaseHTTPRequestHandler):
    """Files of small and large models alike travel in the commit."""

    files: dict[str, bytes]
    created: list[dict[str, Any]]

    def do_GET(self) -> None:
        self._answer({"name": "ann", "type": "user", "orgs": []})

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
        else:
            self._answer({}, 404)

    def _answer(self, body: Any, status: int = 200) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            body, status = {"error": "Invalid username or password."}, 401
        sent = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def hub() -> Iterator[tuple[str, type[Hub]]]:
    """Give the hub's address, and what it keeps."""
    kept = type("Kept", (Hub,), {"files": {}, "created": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kept)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", kept
    finally:
        server.shutdown()
        server.server_close()
