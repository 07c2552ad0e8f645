"""The command line: ``rayrft run | bench | reproduce | serve | resume | export | status | stop | watch | doctor |
plan | view | trace | data | buffer``, and ``pause | unpause | checkpoint | evaluate | scale | set | skip-stage`` of a
running run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from rayrft.cli import ConfigFile, Overrides, Storage, changes, data, say
from rayrft.cli import Run as RunName
from rayrft.cli.follow import exit_on_signals, exit_status, follow, signals
from rayrft.cli.reproduce import reproduce
from rayrft.config import load_config, parse_override, read_config
from rayrft.config.serve import FeedbackConfig, RewardServiceConfig, ViewerConfig
from rayrft.core import launch, publish
from rayrft.core.checkpoints import RUNS, export, find_folder
from rayrft.core.cluster import connect
from rayrft.core.doctor import doctor as examine
from rayrft.core.placement import running_runs, starting_runs
from rayrft.core.plan import PartMemory
from rayrft.core.plan import plan as plan_memory
from rayrft.core.run import Run
from rayrft.core.shared_buffer import buffer_status, buffers, stop_buffer
from rayrft.errors import ActorDied, ConfigError, RayrftError, RunFinished
from rayrft.files import local_path
from rayrft.runtime.handle import root_cause, until_dead

if TYPE_CHECKING:
    from rayrft.core.services import OpenService
    from rayrft.monitor.summary import RunStatus

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
serve = typer.Typer(no_args_is_help=True, help="Serve a policy, rewards, or a page for feedback.")
app.add_typer(serve, name="serve")
app.add_typer(data.app, name="data")
buffer = typer.Typer(no_args_is_help=True, help="List and end the Buffers at which explore and train jobs meet.")
app.add_typer(buffer, name="buffer")
app.command()(reproduce)

_BufferName = Annotated[str, typer.Argument(help="a Buffer's name: buffer.name of its jobs")]
_RunFolder = Annotated[str, typer.Argument(help="a run's folder, or its name in runs/")]


@app.command()
def run(config: ConfigFile, overrides: Overrides = None) -> None:
    """Run a config to its end."""
    checked = load_config(config, changes(overrides))
    if checked.mode == "bench":
        return run_bench(config, overrides)
    try:
        handle = launch.start(checked, say=say)
    except RunFinished as finished:  # with on_existing: resume, the command succeeds as often as it is run
        return say(finished.problem)
    follow(handle)


@app.command("bench")
def run_bench(
    config: Annotated[str, typer.Argument(help="YAML file, of a bench or of a run")],
    overrides: Overrides = None,
    model: Annotated[list[str] | None, typer.Option(help="NAME=MODEL, besides those of bench.models")] = None,
    scores: Annotated[
        Path | None, typer.Option("--json", parser=local_path, help="a file to write the scores to as well")
    ] = None,
    plot: Annotated[Path | None, typer.Option(parser=local_path, help="a file to write the plot to as well")] = None,
) -> None:
    """Evaluate models on task sets. An interrupted evaluation continues when it is run again."""
    from rayrft.benchmark.bench import bench

    models = {name: str(path) for name, path in map(parse_override, model or [])}
    try:
        result = bench(config, models=models, say=say, **changes(overrides))
    except SystemExit:
        say("run the same command again to skip what is done")
        raise
    if scores is not None:
        scores.write_text(result.to_json())
    if plot is not None:
        result.save_plot(plot)
    say(f"\n{result.table()}\n")
    say(f"results     {scores or result.folder / 'results.json'}\nplot        {plot or result.folder / 'plot.png'}")


@serve.command()
def policy(config: ConfigFile, overrides: Overrides = None) -> None:
    """Serve a config's model to applications, and train it on their sessions."""
    follow(launch.start(load_config(config, {"mode": "serve", **changes(overrides)}), say=say))


@serve.command()
def rewards(
    config: Annotated[str, typer.Argument(help="YAML file with a reward section")], overrides: Overrides = None
) -> None:
    """Serve rewards over HTTP, for training elsewhere, until Ctrl-C."""
    from rayrft.core.services import serve_rewards

    checked = read_config(RewardServiceConfig, config, changes(overrides))
    _until_interrupted(serve_rewards(checked, say), "rewards")


@serve.command()
def weights(config: ConfigFile, overrides: Overrides = None) -> None:
    """Serve the policy of a run of another cluster, by the weights that it writes as files, until Ctrl-C."""
    from rayrft.core.services import serve_weights

    _until_interrupted(serve_weights(load_config(config, changes(overrides)), say), "policy")


@serve.command()
def feedback(
    run: RunName,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="port=8000 rule=uncertain labels=[polite,rude] …")
    ] = None,
    storage: Storage = RUNS,
) -> None:
    """Serve a page where people judge and edit a run's answers, while it is running or after its end, until Ctrl-C."""
    from rayrft.core.services import serve_feedback

    settings = read_config(FeedbackConfig, {}, changes(overrides))
    _until_interrupted(serve_feedback(find_folder(run, storage), settings), "feedback page")


@serve.command("view")
def view_on_cluster(
    storage: Annotated[
        Path, typer.Argument(parser=local_path, help="a folder of run folders that the head node can read")
    ] = RUNS,
    overrides: Overrides = None,
) -> None:
    """Serve the page of `rayrft view` on a cluster's Ray Serve, at /viewer, until Ctrl-C."""
    from rayrft.core.services import deploy_viewer

    settings = read_config(ViewerConfig, {"port": 8000}, changes(overrides))
    _until_interrupted(deploy_viewer(storage, settings), "viewer")


@app.command()
def view(
    storage: Annotated[Path, typer.Argument(parser=local_path, help="a folder of run folders, or a run folder")] = RUNS,
    overrides: Annotated[list[str] | None, typer.Argument(help="port=8100 host=127.0.0.1 keys_file=… …")] = None,
) -> None:
    """Serve a page over runs and their rows, running and ended ones, until Ctrl-C. It needs no cluster."""
    from rayrft.core.services import REPORTS
    from rayrft.viewer.app import serve_viewer

    serve_viewer(storage, read_config(ViewerConfig, {}, changes(overrides)), say, REPORTS)


@app.command("trace")
def write_trace(
    run: _RunFolder,
    to: Annotated[Path, typer.Option(parser=local_path, help="the file to write")] = Path("trace.json.gz"),
    steps: Annotated[str, typer.Option(metavar="FIRST:LAST", help="steps, such as 10:20, 10: or :20")] = ":",
) -> None:
    """Write who was busy when as a trace for https://ui.perfetto.dev, with the critical path of every step."""
    from rayrft.viewer.timeline import write_perfetto

    first, colon, last = steps.partition(":")
    if not colon or not all(each.isdecimal() or not each for each in (first, last)):
        raise ConfigError("must be FIRST:LAST", "give numbers of steps, such as 10:20", field="--steps", value=steps)
    count = write_perfetto(find_folder(run), to, int(first or 0), int(last) if last else None)
    print(f"{count} events written to {to}; open it in https://ui.perfetto.dev")


def _until_interrupted(service: OpenService, what: str) -> NoReturn:
    """Wait for SIGINT or SIGTERM, then end the service. Raises ActorDied if its owner dies otherwise."""
    received: list[int] = []

    def interrupted(number: int) -> None:
        received.append(number)
        service.anchor.kill()

    try:
        say(f"{what} at {service.url}{service.key_hint}")
        with signals(interrupted):
            until_dead(service.anchor)
        if not received:
            raise ActorDied("died", "see the Ray dashboard, and start the service again", field=service.anchor.name)
        say("ending")
    finally:
        service.stop()
    raise SystemExit(128 + received[0])


@app.command("resume")
def resume_run(run: _RunFolder, overrides: Overrides = None) -> None:
    """Resume a run that crashed or was stopped, from its latest checkpoint."""
    follow(launch.resume(find_folder(run), say=say, **changes(overrides)))


@app.command("export")
def export_checkpoint(
    run: _RunFolder,
    to: Annotated[Path, typer.Option(parser=local_path, help="the folder to write, in Hugging Face format")],
    step: Annotated[int | None, typer.Option(help="step of the checkpoint; the latest by default")] = None,
    merge: Annotated[bool, typer.Option(help="LoRA: merge the adapter, or write it alone, for peft")] = True,
    push: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="upload it to the hub, with the run's whole config")
    ] = None,
    private: Annotated[bool, typer.Option(help="create the hub's repository as a private one")] = False,
) -> None:
    """Write a checkpoint as a model that transformers and vLLM can load, with a model card."""
    folder = find_folder(run)
    if push is not None:
        publish.check_hub(push)
    step = export(folder, to, step, merged=merge)
    publish.write_card(folder, to, step)
    print(f"step {step} written to {to}")
    if push is not None:
        print(f"uploaded to {publish.push(to, push, private=private)}")


@app.command()
def status(
    name: Annotated[str | None, typer.Argument(help="a run, or its folder; all on the cluster by default")] = None,
) -> None:
    """Print the status of runs, also of one that is starting or has ended."""
    if not name:
        connect(start=False)
    names = [name] if name else running_runs() + starting_runs()
    if not names:
        print("no run is running")
    for run_name in names:
        print(launch.find_status(run_name).to_json())


@app.command()
def doctor(
    config: Annotated[
        str | None, typer.Argument(help="YAML file of a run, whose models and folder are looked for")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Examine the nodes of the cluster, or this machine: one line each, with a remedy. Status 1 if one has a fault."""
    findings = examine(config, **changes(overrides))
    print(findings)
    if any(finding.state == "fault" for finding in findings):
        raise typer.Exit(1)


@app.command()
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    gpu_gb: Annotated[float, typer.Option(help="memory of a GPU, in GB of 1e9 bytes")] = 80.0,
    step_s: Annotated[
        float | None, typer.Option(help="seconds of a step; by default as the run's folder has them, or 60")
    ] = None,
) -> None:
    """Print the GPU memory of engines and ranks, what fits, and what a day writes to the disk. Status 1 if they
    do not fit."""
    found = plan_memory(config, gpu_gb=gpu_gb, step_s=step_s, **changes(overrides))
    parts = [part for part in found if isinstance(part, PartMemory)]
    print(found if parts else f"nothing runs on GPUs: set explorer.engine.gpus and trainer.gpus\n{found}".rstrip())
    if not all(part.fits for part in parts):
        raise typer.Exit(1)


@app.command()
def watch(name: str) -> None:
    """Follow a run to its end from anywhere on its cluster; exit as its own command does."""
    found = launch.find_status(name)
    if not found.ended:
        run = launch.attach(name)
        run.watch(say)
        found = run.status()
    say(_last_line(found))
    raise SystemExit(exit_status(found.status))


@app.command()
def stop(name: str) -> None:
    """Ask a run to save its weights and end. Exit status 1 if it has failed before."""
    found = launch.find_status(name)
    if found.ended:
        print(_last_line(found))
        raise SystemExit(exit_status(found.status) == 1)
    launch.attach(name).stop()
    print(f"{name}: stopping")


def _steer(request: str, done: str) -> Callable[[str], None]:
    def command(name: str) -> None:
        print(f"{name}: {done.format(getattr(launch.attach(name), request)())}")

    command.__doc__ = getattr(Run, request).__doc__
    return command


for _request, _done in {
    "pause": "paused after step {}",
    "unpause": "was paused for {:.0f} s",
    "checkpoint": "wrote the checkpoint of step {}",
    "skip_stage": "ends the stage after {} steps",
}.items():
    app.command(_request.replace("_", "-"))(_steer(_request, _done))


@app.command()
def evaluate(name: str, temperature: float | None = None, samples: int | None = None) -> None:
    """Evaluate a running run now, at the config's temperatures and samples or others."""
    print(f"{name}: evaluated: {launch.attach(name).evaluate(temperature, samples)}")


@app.command()
def scale(name: str, engines: int) -> None:
    """Change the number of rollout engines of a running run."""
    print(f"{name}: {engines} rollout engines, {launch.attach(name).scale(engines)} before")


@app.command("set")
def set_keys(
    name: str, changes_: Annotated[list[str], typer.Argument(metavar="CHANGES", help="key.sub=value …")]
) -> None:
    """Change keys of a running run's config, all of them or none."""
    [(key, value), *more] = changes(changes_).items()
    print(f"{name}: changed after step {launch.attach(name).set(key, value, **dict(more))}")


@buffer.command("list")
def list_buffers() -> None:
    """Print a line per Buffer: its rows, and its jobs."""
    connect(start=False)
    for name in buffers():
        found = buffer_status(name)
        print(f"{name}: {', '.join(sorted(found.jobs))}; {found.ledger}")


@buffer.command("status")
def show_buffer(name: _BufferName) -> None:
    """Print a Buffer's ledger and jobs."""
    connect(start=False)
    found = buffer_status(name)
    print(json.dumps({**asdict(found), "folder": str(found.folder)}, indent=2))


@buffer.command("stop")
def end_buffer(
    name: _BufferName, force: Annotated[bool, typer.Option(help="also while jobs use it, which then fail")] = False
) -> None:
    """End a Buffer. Its log stays, and the next job that names it continues it."""
    connect(start=False)
    print(f"{name}: ended; its log is in {stop_buffer(name, force=force).folder}")


def _last_line(status: RunStatus) -> str:
    resume = "" if status.status == "finished" else f"; to resume: rayrft resume {status.folder}"
    error = f"\nerror: {status.error}" if status.error else ""
    return f"{status.name}: {status.status} after {status.step} steps{resume}{error}"


def main() -> None:
    """Run the command line: a RayrftError is printed to stderr as one paragraph, with exit status 1."""
    with exit_on_signals():
        try:
            app()
        except RayrftError as error:
            # An actor's error may come with Ray's traceback as its text.
            print(f"error: {root_cause(error)}", file=sys.stderr, flush=True)
            sys.exit(1)
