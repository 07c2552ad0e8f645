"""How the Trainer starts Ray Train, and what it asks of the ranks."""

from __future__ import annotations

import asyncio
import inspect
import socket
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from ray.exceptions import ObjectLostError

from rayrft.buffer.leases import BatchShare
from rayrft.config.trainer import TrainerConfig
from rayrft.errors import ActorDied
from rayrft.explorer.engines.engine import RolloutEngine
from rayrft.trainer.api import Mailbox, RankApi
from rayrft.trainer.rank import Rank
from rayrft.trainer.trainer import Trainer, ask_ranks
from tests.bench import hosts
from tests.chaos import scripted_run
from tests.chaos.simulated import VirtualLoop
from tests.monitor import made
from tests.scripted import remote
from tests.scripted_engine import ScriptedEngine
from tests.trainer.ranks import on_ranks

SNAPSHOT = "checkpoint_manager_snapshot.json"


def started(folder: Path, gpus: float, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What Ray Train would be given."""
    given: dict[str, Any] = {}

    class Fake:
        def __init__(self, group: Any, loop: Any, **settings: Any) -> None:
            given.update(settings, group=group)

        def fit(self) -> None:
            given["snapshot"] = (folder / SNAPSHOT).exists()

    monkeypatch.setattr("rayrft.trainer.ray_train.RankTrainer", Fake)
    Trainer(TrainerConfig(gpus=gpus), "their group")._fit_blocking(folder, None)  # type: ignore[arg-type]
    return given


def test_collectives_have_a_backend_for_every_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.train.torch.config import _is_backend_nccl
    from torch.distributed import BackendConfig

    for gpus, backends in ((0, {"cpu": "gloo"}), (1, {"cpu": "gloo", "cuda": "nccl"})):
        backend = started(tmp_path, gpus, monkeypatch)["torch_config"].backend
        assert backends.items() <= BackendConfig(backend).get_device_backend_map().items()
        assert _is_backend_nccl(backend) == (gpus > 0)


def test_rank_0_listens_at_the_port_that_ray_train_tells_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.train.torch.config import TorchConfig
    from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup

    from rayrft.trainer.ray_train import controller_on

    told: dict[str, Any] = {}
    workers = object.__new__(controller_on(None).worker_group_cls)  # type: ignore[attr-defined]
    monkeypatch.setattr(WorkerGroup, "execute_single", lambda self, rank, fn, *given: fn(*given))
    monkeypatch.setattr(WorkerGroup, "execute", lambda self, fn, **given: told.update(given))
    monkeypatch.setattr(WorkerGroup, "__len__", lambda self: 0)
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True}, {"Alive": False}])
    monkeypatch.setattr("ray.get", list)  # it would start a cluster, to wait for nothing
    TorchConfig(backend="gloo").backend_cls().on_start(workers, TorchConfig(backend="gloo"))
    socket.create_connection((told["addr"], told["port"]), timeout=5).close()


@pytest.mark.parametrize(("bundles", "expected"), [(4, [0, 1, 2, 3]), (2, [0, 0, 1, 1]), (1, [0] * 4)])
def test_ranks_are_spread_evenly_over_the_bundles_of_their_group(
    bundles: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup

    from rayrft.trainer.ray_train import controller_on

    def found(self: WorkerGroup, *arguments: Any, **settings: Any) -> Any:
        bound = inspect.signature(create).bind(self, *arguments, **settings)
        return bound.arguments["placement_group_bundle_indices"], bound.arguments["resources_per_worker"]

    name, kind = "_create_workers", controller_on(None).worker_group_cls  # type: ignore[attr-defined]
    create = vars(WorkerGroup)[name]
    monkeypatch.setattr(WorkerGroup, name, found)
    workers, group = object.__new__(kind), SimpleNamespace(bundle_count=bundles)
    assert vars(kind)[name](workers, 4, group, {"GPU": 1}, replica_group_size=None) == (expected, {"GPU": 1})


@pytest.mark.parametrize(("interface", "actor"), [(RankApi, Rank), (Mailbox, Trainer)])
def test_every_method_of_an_interface_has_its_signature(interface: type, actor: type) -> None:
    def signature(method: Any) -> list[inspect.Parameter | Any]:
        found = inspect.signature(method)  # Ray adds a parameter of its own to the methods of an actor's class
        return [each for each in found.parameters.values() if each.name != "_ray_trace_ctx"] + [found.return_annotation]

    methods = {name: method for name, method in vars(interface).items() if not name.startswith("_")}
    for name, method in methods.items():
        assert signature(vars(actor)[name]) == signature(method), name


STAND_INS = [
    *((stand_in, RankApi) for stand_in in (hosts.ScriptedRank, scripted_run.ScriptedRank)),
    *((stand_in, RolloutEngine) for stand_in in (hosts.ScriptedEngine, scripted_run.ScriptedEngine, ScriptedEngine)),
]


@pytest.mark.parametrize(("stand_in", "actor"), STAND_INS)
def test_what_stands_for_an_actor_takes_what_it_takes(stand_in: type, actor: type) -> None:
    methods = {name: method for each in reversed(stand_in.mro()) for name, method in vars(each).items()}
    taken = {name for name, method in methods.items() if inspect.isfunction(method) and hasattr(actor, name)}
    for name in {name for name in taken if not name.startswith("_")}:
        found = inspect.signature(getattr(actor, name)).parameters.values()
        parameters = [each for each in found if each.name != "_ray_trace_ctx"]  # Ray's own, of an actor's class
        given = [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        named = {each.name: each for each in parameters if each.kind is each.KEYWORD_ONLY}
        inspect.signature(methods[name]).bind(*given, **named)
    assert len(taken) > 5


async def test_ranks_that_have_not_answered_are_named(tmp_path: Path) -> None:
    trainer = Trainer(TrainerConfig(ranks=3), None)
    training = asyncio.ensure_future(ask_ranks(remote(trainer), RankApi.score, []))
    writing = asyncio.ensure_future(trainer.written(tmp_path))
    await trainer.next_call(0, 0)
    idle = [asyncio.ensure_future(trainer.next_call(1, 1, "done"))]
    for _ in range(10):  # turns of the event loop, in which rank 1 answers
        await asyncio.sleep(0)
    await trainer.wrote(0, tmp_path, None)
    waits = {wait.target: wait.what for wait in (await trainer.waiting()).waits}
    assert waits.pop("score of ranks") == "0, 2"
    [(what, late)] = waits.items()
    assert what == "part of a checkpoint of ranks" and late.startswith("1, 2; ")
    assert late.endswith(f" MB free in {tmp_path.parent}")
    for rank in range(3):
        idle.append(asyncio.ensure_future(trainer.next_call(rank, 1, "done")))
        await trainer.wrote(rank, tmp_path, None)
    assert await training == ["done"] * 3
    await writing
    assert (await trainer.waiting()).waits == []
    await trainer.stop()
    assert await asyncio.gather(*idle) == [None] * 4


async def test_a_rank_gets_its_own_share_of_a_lease() -> None:
    lease = replace(made.lease(0), shares=tuple(BatchShare((), tokens, ()) for tokens in (5, 7)))
    trainer = Trainer(TrainerConfig(ranks=2), None)
    training = asyncio.ensure_future(ask_ranks(remote(trainer), RankApi.train, lease))
    answering = list[asyncio.Future[Any]]()
    for rank, tokens in enumerate(([5, 0], [0, 7])):
        call = await trainer.next_call(rank, 0)
        assert call is not None and [share.tokens for share in call.args[0].shares] == tokens
        answering.append(asyncio.ensure_future(trainer.next_call(rank, 1, rank)))
    assert await training == [0, 1]
    await trainer.stop()
    assert await asyncio.gather(*answering) == [None, None]


def test_ranks_are_started_once_in_the_group_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / SNAPSHOT).write_text("{}")  # of the run that is resumed
    given = started(tmp_path, 0, monkeypatch)
    assert given["snapshot"] is False
    failures = given["run_config"].failure_config
    assert given["group"] == "their group"
    assert failures.max_failures == failures.max_preemption_failures == failures.controller_failure_limit == 0


async def test_ranks_that_do_not_come_up_end_the_run_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(TrainerConfig(ranks=3, start_timeout_s=0.05), None)

    async def one_comes_up(*_: Any) -> None:
        await trainer.ready(1, None)
        await asyncio.Event().wait()

    monkeypatch.setattr(trainer, "_run", one_comes_up)
    with pytest.raises(ActorDied) as late:
        await asyncio.wait_for(trainer.start(tmp_path, None), 10)  # type: ignore[arg-type]
    assert late.value.field == "trainer rank 0" and "[0, 2] of 3" in late.value.problem


def test_progress_of_a_rank_moves_the_deadline_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(TrainerConfig(ranks=2, start_timeout_s=60.0), None)

    async def loads(*_: Any) -> None:
        await trainer.ready(1, None)
        for size in range(5):
            await asyncio.sleep(50)
            await trainer.loading(0, f"loads the model, {size}.0 GB in memory")
            assert (await trainer.waiting()).doing == f"rank 0 loads the model, {size}.0 GB in memory"
        await asyncio.sleep(70)
        await trainer.loading(0, "loads the model, 9.0 GB in memory")  # too late

    monkeypatch.setattr(trainer, "_run", loads)
    loop = VirtualLoop()
    began = loop.time()
    try:
        with pytest.raises(ActorDied, match=r"\[0\] of 2 are not up and have made no progress for 60 s"):
            loop.run_until_complete(trainer.start(tmp_path, None))  # type: ignore[arg-type]
        assert loop.time() - began == pytest.approx(5 * 50 + 60)
        loop.run_until_complete(trainer._fit)  # type: ignore[arg-type]
    finally:
        loop.close()


def train_when_rank_1_lost_its_blocks() -> Any:
    def fetch(share: int, algorithm: Any) -> list[Any]:
        if share == 1:
            raise ObjectLostError("0" * 56, None, "")
        return []

    rank = object.__new__(Rank)
    rank._index = dist.get_rank()
    learner = SimpleNamespace(algorithm=None, phase=nullcontext, step=lambda batches: "a step")
    rank.learner = learner  # type: ignore[assignment]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rayrft.trainer.rank.fetch_mini_batches", fetch)
        return rank.train(SimpleNamespace(shares=(0, 1)))  # type: ignore[arg-type]


def test_no_rank_takes_a_step_if_one_lost_its_blocks() -> None:
    assert on_ranks(2, train_when_rank_1_lost_its_blocks) is None
