"""The command line: ``rayrft run | resume | export | status | stop | watch | data``."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rayrft import cli_data
from rayrft.config import load_config, parse_override
from rayrft.core.checkpoints import find_folder
from rayrft.errors import RayrftError

if TYPE_CHECKING:
    from rayrft.core.run import Run

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(cli_data.app, name="data")


@app.command()
def run(
    config: Annotated[str, typer.Argument(help="YAML file")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value …")] = None,
) -> None:
    """Run a config to its end."""
    from rayrft.core.launch import start

    follow(start(load_config(config, dict(map(parse_override, overrides or []))), say=_say))


@app.command()
def resume(
    run: Annotated[str, typer.Argument(help="a run's folder, or its name in runs/")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value …")] = None,
) -> None:
    """Go on with a run that crashed or was stopped, from its latest checkpoint."""
    from rayrft.core.launch import resume

    follow(resume(find_folder(run), say=_say, **dict(map(parse_override, overrides or []))))


@app.command()
def export(
    run: Annotated[str, typer.Argument(help="a run's folder, or its name in runs/")],
    to: Annotated[Path, typer.Option(help="the folder to write, in Hugging Face format")],
    step: Annotated[int | None, typer.Option(help="of the checkpoint; the latest by default")] = None,
    merge: Annotated[bool, typer.Option(help="LoRA: a whole model, or the adapter alone, for peft")] = True,
) -> None:
    """Write a checkpoint as a model that transformers and vLLM can load."""
    from rayrft.core.checkpoints import export

    print(f"step {export(find_folder(run), to, step, merged=merge)} written to {to}")


@app.command()
def status(name: Annotated[str | None, typer.Argument(help="a run; all by default")] = None) -> None:
    """Where runs stand."""
    from rayrft.core.cluster import connect
    from rayrft.core.launch import attach, running

    connect(start=False)
    names = [name] if name else running()
    if not names:
        print("no run is under way")
    for each in names:
        print(json.dumps(attach(each).status(), indent=2))


@app.command()
def watch(name: str) -> None:
    """Follow a run from anywhere on its cluster."""
    from rayrft.core.launch import attach

    attach(name).watch()


@app.command()
def stop(name: str) -> None:
    """Ask a run to save its weights and end."""
    from rayrft.core.launch import attach

    attach(name).stop()
    print(f"{name}: stopping")


def follow(handle: Run) -> dict[str, Any]:
    """Print a run's lines, table and whereabouts, and give its summary. Raises the root cause when the run fails.

    Ctrl-C (or SIGTERM) asks the run to stop, and a second one ends it at once. Either way a summary is written, and
    SystemExit is raised with 128 and the signal's number.
    """
    received: list[int] = []

    def interrupted(number: int) -> None:
        received.append(number)
        if len(received) == 1:
            _say("stopping after the step under way (once more: at once)")
            threading.Thread(target=handle.stop, daemon=True).start()  # a Master that hangs does not answer
        else:
            handle.kill()

    with _signals(interrupted):
        try:
            handle.watch(_say)
            summary = handle.result()
        except RayrftError:
            if len(received) < 2:
                raise
            _say(f"ended at once; to go on: rayrft resume {handle.folder}")
            raise SystemExit(128 + received[0]) from None
    _report(handle, summary)
    if received:
        raise SystemExit(128 + received[0])
    return summary


@contextlib.contextmanager
def _signals(received: Callable[[int], None]) -> Iterator[None]:
    """In here ``received`` is called, in a thread of its own, with the number of every SIGINT and SIGTERM. A handler
    would wait for calls into Ray to look for signals, which takes up to a second and makes one of two."""
    reading, writing = socket.socketpair()
    writing.setblocking(False)  # as Python asks for
    numbers = (signal.SIGINT, signal.SIGTERM)

    def listen() -> None:
        while number := reading.recv(1):
            received(number[0])

    before = [signal.signal(number, lambda *_: None) for number in numbers]
    fd = signal.set_wakeup_fd(writing.fileno())
    listening = threading.Thread(target=listen, daemon=True)
    listening.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(fd)
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        writing.close()
        listening.join()
        reading.close()


def _report(handle: Run, summary: dict[str, Any]) -> None:
    from rayrft.monitor.records import read_records
    from rayrft.monitor.report import accuracy_table

    _say("\n" + accuracy_table(read_records(handle.folder)))
    counters = summary["counters"]
    if counters["sampled"] is not None:
        _say(
            f"\nrows: sampled {counters['sampled']} = trained {counters['trained']} + dropped "
            f"{sum(counters['dropped'].values())} {counters['dropped']} + held {counters['held']}"
        )
    _say(f"{summary['status']} after {summary['seconds']['total']:.0f} s, {summary['steps']} steps")
    if (plot := handle.folder / "plot.png").exists():
        _say(f"plot        {plot}")
    _say(f"checkpoint  {summary['checkpoint'] or f'to go on: rayrft resume {handle.folder}'}")


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    """Entry point: an error of ours is one paragraph on stderr and exit status 1."""
    try:
        app()
    except RayrftError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
