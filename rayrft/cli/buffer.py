"""``rayrft buffer``: the Buffers that belong to no run, at which explore and train jobs meet."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rayrft.buffer.shared import SharedStatus

app = typer.Typer(no_args_is_help=True, help="List and end the Buffers at which explore and train jobs meet.")

_Name = Annotated[str, typer.Argument(help="a Buffer's name: buffer.name of its jobs")]


@app.command("list")
def list_buffers() -> None:
    """Print a line per Buffer: its rows, and its jobs."""
    from rayrft.core.cluster import connect
    from rayrft.core.shared_buffer import buffer_status, buffers

    connect(start=False)
    for name in buffers():
        status = buffer_status(name)
        print(f"{name}: {', '.join(sorted(status.jobs))}; {status.ledger}")


@app.command()
def status(name: _Name) -> None:
    """Print a Buffer's ledger and jobs."""
    from rayrft.core.cluster import connect
    from rayrft.core.shared_buffer import buffer_status

    connect(start=False)
    print(_to_json(buffer_status(name)))


@app.command()
def stop(
    name: _Name, force: Annotated[bool, typer.Option(help="also while jobs use it, which then fail")] = False
) -> None:
    """End a Buffer. Its log stays, and the next job that names it goes on with it."""
    from rayrft.core.cluster import connect
    from rayrft.core.shared_buffer import stop_buffer

    connect(start=False)
    ended = stop_buffer(name, force=force)
    print(f"{name}: ended; its log is in {ended.folder}")


def _to_json(status: SharedStatus) -> str:
    return json.dumps({**asdict(status), "folder": str(status.folder)}, indent=2)
