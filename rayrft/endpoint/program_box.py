"""Runs a program in the sandbox of an attempt: a script that `program.py` sends there.

It reads its orders from stdin, as JSON: ``command`` with its ``input`` and ``environment``, the ``files`` of the folder
(base64), and what to ``keep`` of it. ``socket`` is the one that leads out, or null, and ``path`` that of the endpoint
there. In the command and in the values of the environment, ``{url}`` before this path is a port of loopback whose
connections are passed on to the socket. At the end it writes one line of JSON: the exit ``status`` of the program, the
end of its ``output``, and the ``files`` that it left.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import sys

TYPE_CHECKING = False  # typing takes a while to import
if TYPE_CHECKING:
    from typing import Any

_OUTPUT = 1 << 18
"""Bytes of output that are kept."""


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.write_eof()


async def _connect(socket: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Connect one connection of loopback with the socket, until both ways are closed."""
    outside_reader, outside_writer = await asyncio.open_unix_connection(socket)
    try:
        await asyncio.gather(_pass_on(reader, outside_writer), _pass_on(outside_reader, writer))
    finally:
        outside_writer.close()
        writer.close()


def _write(files: dict[str, str]) -> None:
    for path, content in files.items():
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(content))


def _kept(keep: str | None) -> dict[str, str]:
    """Return the files to keep, by path: those of the folder if ``keep`` is a point, else the one of this name."""
    paths = [keep] if keep else []
    if keep == ".":
        paths = [os.path.relpath(os.path.join(folder, name)) for folder, _, names in os.walk(".") for name in names]
        paths.remove(sys.argv[0])
    files = {}
    for path in paths:
        if os.path.isfile(path) and not os.path.islink(path):
            with open(path, "rb") as file:
                files[path] = base64.b64encode(file.read()).decode()
    return files


async def _run(orders: dict[str, Any]) -> dict[str, Any]:
    mark, url = "{url}" + orders["path"], ""
    if orders["socket"] is not None:
        server = await asyncio.start_server(lambda *streams: _connect(orders["socket"], *streams), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}{orders['path']}"
    environment = {name: value.replace(mark, url) for name, value in orders["environment"].items()}
    process = await asyncio.create_subprocess_exec(
        *(word.replace(mark, url) for word in orders["command"]),
        env={**os.environ, **environment},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(orders["input"].encode())
    with contextlib.suppress(ConnectionError):  # it reads none of it
        await process.stdin.drain()
    process.stdin.close()
    output = b""
    while data := await process.stdout.read(1 << 16):
        output = (output + data)[-_OUTPUT:]
    status = await process.wait()
    return {"status": status, "output": output.decode(errors="replace"), "files": _kept(orders["keep"])}


def main() -> None:
    orders = json.loads(sys.stdin.readline())
    try:
        _write(orders["files"])
        said = asyncio.run(_run(orders))
    except OSError as error:
        said = {"problem": f"{error.filename or orders['command'][0]}: {error.strerror}"}
    os.write(1, json.dumps(said).encode() + b"\n")


if __name__ == "__main__":
    main()
