"""A trainer that starts from a checkpoint continues as the one that wrote it, on any number of ranks."""

from __future__ import annotations

import os
import pickle
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from rayrft.algorithms import TokenBatch
from rayrft.algorithms.ratios import TokenLoss
from rayrft.config.stage import UpdateConfig
from rayrft.config.trainer import OptimizerConfig
from rayrft.errors import ModelError, RayrftError, StorageError
from rayrft.files import Room
from rayrft.trainer import dcp
from rayrft.trainer.batches import TrainRow
from rayrft.trainer.dcp import Checkpointer, load_weights, read_base
from rayrft.trainer.learner import Learner
from tests.trainer.learners import adapt, flat, make_learner, make_model, mine, own_rows, pairs, weights, write
from tests.trainer.ranks import on_ranks

PIECES = {"kl": "k1", "kl_in": "reward", "kl_target": 1e-3, "kl_horizon": 50, "entropy": "bonus", "entropy_goal": 9}
SCHEDULE = OptimizerConfig(lr=1e-2, schedule="cosine", warmup_steps=2)


def ready(kind: str = "ppo", replicas: int = 1) -> Learner:
    """PPO with a KL, which has everything: reference, critic, two optimisers, coefficients that change; the same with
    adapters; or a reward model."""
    if kind == "reward model":
        return make_learner("reward_model", optimizer=SCHEDULE, sharded=True, replicas=replicas)
    adapted = {name: adapt(make_model()) for name in ("policy", "valued") if kind == "adapters"}
    update = UpdateConfig(reference_refresh=None if adapted else 2)
    how: dict[str, Any] = {"optimizer": SCHEDULE, "update": update, "sharded": True, "replicas": replicas}
    return make_learner("ppo", PIECES, **how, **adapted)


def rows_of(learner: Learner) -> list[TrainRow]:
    return mine(pairs() if learner.reward_model else own_rows())


def everything(learner: Learner) -> torch.Tensor:
    """The weights of the policy and of the critic or the reward model."""
    beside: Any = learner.critic or learner.reward_model
    return flat([*learner.policy.parameters(), *beside.parameters()])


def _save_and_continue(kind: str, folder: Path) -> Any:
    # Of four ranks two are replicas of the other two.
    learner = ready(kind, replicas=dist.get_world_size() // 2 or 1)
    for _ in range(3):
        learner.step([rows_of(learner)])
    before = everything(learner)
    assert write(learner, folder, rows_of(learner)) == [None]
    for _ in range(2):
        result = learner.step([rows_of(learner)]).metrics
    return before, everything(learner), result


def _load_and_continue(kind: str, folder: Path) -> Any:
    learner = ready(kind)
    Checkpointer().load(learner, folder)
    before = everything(learner)
    for _ in range(3):
        result = learner.step([rows_of(learner)]).metrics
    return before, everything(learner), result


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("ppo", 2, 1),
        ("ppo", 1, 2),
        pytest.param("ppo", 2, 4, marks=pytest.mark.slow),
        ("ppo", 4, 2),
        ("adapters", 2, 1),
        ("reward model", 2, 1),
    ],
)
def test_resumed_training_equals_uninterrupted_training(kind: str, first: int, second: int, tmp_path: Path) -> None:
    before, after, result = on_ranks(first, _save_and_continue, kind, tmp_path)
    again, resumed, last = on_ranks(second, _load_and_continue, kind, tmp_path)
    torch.testing.assert_close(again, before, atol=1e-12, rtol=0)
    torch.testing.assert_close(resumed, after, atol=1e-9 if kind == "adapters" else 1e-6, rtol=0)
    assert (after - before).abs().max() > 1e-3
    for field in ("loss", "value_loss", "kl", "kl_coef", "entropy_coef", "lr", "grad_norm"):
        assert getattr(last, field) == pytest.approx(getattr(result, field), abs=1e-6), field
    if kind == "ppo":
        assert result.kl_coef != pytest.approx(1e-3, rel=0.01)
        assert result.entropy_coef == pytest.approx(1e-3 + 5 * 5e-3)


def dropped(logprobs: torch.Tensor, batch: TokenBatch) -> TokenLoss:
    """Drops tokens at random, as a user's own loss may."""
    return TokenLoss(-batch.advantages * logprobs * (torch.rand(logprobs.shape) < 0.5))


def drawing() -> Learner:
    return make_learner("grpo", {"policy_loss": f"{__name__}:dropped"}, sharded=True)


def _draw_and_continue(folder: Path) -> Any:
    learner = drawing()
    learner.step([mine(own_rows())])
    written: list[str | None] = write(learner, folder, mine(own_rows()))  # which takes a step, too
    learner.step([mine(own_rows())])
    drawn = torch.zeros(dist.get_world_size())
    drawn[dist.get_rank()] = torch.rand(())
    dist.all_reduce(drawn)
    return written, weights(learner), drawn


def _load_and_draw(folder: Path) -> Any:
    learner = drawing()
    Checkpointer().load(learner, folder)
    begun = torch.get_rng_state()
    learner.rng.reseed(step=1)
    reseeded = torch.equal(begun, torch.get_rng_state())
    torch.set_rng_state(begun)
    for _ in range(2):
        learner.step([mine(own_rows())])
    return weights(learner), reseeded


def _load_quantised(folder: Path) -> str:
    learner = drawing()
    learner.config = learner.config.model_copy(update={"moments": "8bit"})
    with pytest.raises(ModelError) as raised:
        Checkpointer().load(learner, folder)
    return str(raised.value)


def test_a_loss_that_draws_random_numbers_draws_the_same_ones_after_a_resume(tmp_path: Path) -> None:
    written, expected, drawn = on_ranks(2, _draw_and_continue, tmp_path)
    resumed, reseeded = on_ranks(2, _load_and_draw, tmp_path)
    assert written == [None] and drawn[0] != drawn[1]
    torch.testing.assert_close(resumed, expected, atol=1e-12, rtol=0)
    assert not reseeded, "the state is that of a beginning"
    _, reseeded = on_ranks(1, _load_and_draw, tmp_path)
    assert reseeded, "on another number of ranks, it follows from seed, step and rank"
    assert "trainer.moments: 8-bit moments are not divided" in on_ranks(1, _load_quantised, tmp_path)


def _save_and_take_weights(folder: Path) -> Any:
    learner = ready()
    learner.step([mine(own_rows())])
    taken = weights(learner)
    assert write(learner, folder, mine(own_rows())) == [None]
    other = ready()
    Checkpointer().load_policy(other.policy, folder)
    return taken, weights(other), other.optimizer.updates, len(other.optimizer.adam.state)


def test_between_stages_only_weights_are_taken_along(tmp_path: Path) -> None:
    taken, found, updates, state = on_ranks(2, _save_and_take_weights, tmp_path)
    torch.testing.assert_close(found, taken, atol=1e-12, rtol=0)
    assert updates == 0 and state == 0
    model = make_model()
    load_weights(tmp_path, model)
    torch.testing.assert_close(flat(model.parameters()), taken)


def _load_what_cannot_be(folder: Path) -> list[str]:
    learner = ready()
    assert write(learner, folder, mine(own_rows())) == [None]
    wider = make_learner("grpo")
    wider.policy.model.resize_token_embeddings(60)
    deeper = make_learner("grpo")
    deeper.policy.model.model.extra = torch.nn.Linear(2, 2)
    [data] = folder.glob("*.distcp")
    said = [_refused(ModelError, each, folder) for each in (wider, deeper)]
    whole = data.read_bytes()
    data.write_bytes(b"x" * len(whole))
    said.append(_refused(StorageError, make_learner("grpo"), folder))
    for file in (data, folder / ".metadata"):
        file.unlink()
        said.append(_refused(StorageError, make_learner("grpo"), folder))
    with pytest.raises(StorageError, match=r"\.metadata is missing"):
        Checkpointer().load(learner, folder)
    return said


def _refused(kind: type[RayrftError], learner: Learner, folder: Path) -> str:
    with pytest.raises(kind) as raised:
        Checkpointer().load_policy(learner.policy, folder)
    return str(raised.value)


def test_a_checkpoint_that_cannot_be_loaded_says_why_and_what_to_do(tmp_path: Path) -> None:
    wider, deeper, damaged, torn, gone = on_ranks(1, _load_what_cannot_be, tmp_path)
    assert "does not fit the model" in wider and "Resume with the model that" in wider
    assert "lacks parameters of the model" in deeper and "extra.weight" in deeper and "adapter and algorithm" in deeper
    assert "cannot be read" in damaged and "Delete the folder" in damaged
    assert "incomplete" in torn and ".distcp is missing" in torn and "Delete the folder" in torn
    assert "incomplete" in gone and ".metadata is missing" in gone


class Forged:
    """A pickle that runs code where it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(RAN),)


RAN = Path(tempfile.gettempdir()) / f"code-of-a-checkpoint-has-run-{os.getpid()}"


@pytest.mark.parametrize("forged", ["metadata", "bytes", "dotted", "torn"])
def test_reading_a_checkpoint_of_somebody_else_runs_no_code_of_theirs(forged: str, tmp_path: Path) -> None:
    save({"base": Forged() if forged == "bytes" else ""}, checkpoint_id=tmp_path, no_dist=True)
    if forged != "bytes":
        path = str(RAN).encode()
        dotted = b"\x80\x04\x8c\x26torch.distributed.checkpoint.metadata\x8c\x08os.mkdir\x93\x8c"
        dotted += bytes([len(path)]) + path + b"\x85R."
        data = {"metadata": pickle.dumps(Forged()), "dotted": dotted, "torn": b""}
        (tmp_path / ".metadata").write_bytes(data[forged])
    with pytest.raises(StorageError, match="cannot be read") as raised:
        read_base(tmp_path, no_dist=True)
    assert not RAN.exists()
    assert raised.value.value == str(tmp_path)


def _save_on_full_disk(limit_s: float, folder: Path) -> Any:
    """Every other time the disk takes a part of what the last rank writes."""
    learner, tries = ready(), list[int]()

    def save_part(state: Any, checkpoint_id: str, process_group: Any) -> None:
        tries.append(len([*folder.glob("*")]))
        save(state, checkpoint_id=checkpoint_id, process_group=process_group)
        if len(tries) % 2:
            full = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
            error: Any = full if len(tries) > 1 else OSError(28, "No space left on device")
            raise CheckpointException("write", {dist.get_world_size() - 1: (error, None)})  # type: ignore[dict-item]

    with (
        mock.patch("rayrft.trainer.dcp.save", save_part),
        mock.patch.object(Room, "poll_s", 0.01),
        mock.patch.object(Room, "limit_s", limit_s),
    ):
        said = write(learner, folder, rows_of(learner))
        again = write(learner, folder, rows_of(learner)) if limit_s else []
    dist.barrier()
    return said, again, tries, Room.waits


def test_a_checkpoint_is_written_again_once_there_is_room_for_it(tmp_path: Path) -> None:
    said, again, tries, waits = on_ranks(2, _save_on_full_disk, 60.0, tmp_path)
    assert said == again == [None] and tries[1] == 0, "what was written takes no room"
    assert len(tries) == 4 and not waits
    assert on_ranks(1, _load_and_continue, "ppo", tmp_path)


def test_a_checkpoint_for_which_there_is_no_room_in_time_is_said_not_to_be_written(tmp_path: Path) -> None:
    [problem], *_ = on_ranks(2, _save_on_full_disk, 0.0, tmp_path)[:1]
    assert "No space left on device (" in problem and "MB free" in problem and not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (MemoryError(), "MemoryError"),
        (RuntimeError("first\nlast"), "RuntimeError: last"),
        (CheckpointException("", {1: (OSError("full"), None)}), "OSError: full"),
    ],
)
def test_what_fails_in_the_background_is_said(error: BaseException, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayrft.trainer.dcp.save", mock.Mock(side_effect=error))
    monkeypatch.setattr(dist, "new_group", lambda backend: None)
    said: list[str | None] = []
    checkpointer = Checkpointer()
    checkpointer.save(make_learner("grpo"), Path("nowhere"), said.append)
    checkpointer._thread.shutdown()
    assert said == [why]


def test_what_lies_on_a_gpu_is_copied_into_pinned_memory_which_is_freed_once_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    with FakeTensorMode(), mock.patch.object(torch, "empty_like", wraps=torch.empty_like) as made:
        assert dcp.to_host(torch.ones(3, device="cuda")).device.type == "cpu"
        assert made.call_args.kwargs == {"device": "cpu", "pin_memory": True}
        assert dcp.to_host(torch.ones(3)).device.type == "cpu" and made.call_count == 1
    monkeypatch.setattr(dist, "new_group", lambda backend: None)
    states: list[dict[str, Any]] = []
    monkeypatch.setattr(dcp, "save", lambda state, **_: states.append(state) or events.append(f"write {bool(state)}"))  # type: ignore[func-returns-value]
    learner, checkpointer = make_learner("grpo"), Checkpointer()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("copied"))
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: events.append(f"freed {not states[0]}"))
    checkpointer.save(learner, Path("nowhere"), lambda problem: events.append(f"done {problem}"))
    checkpointer._thread.shutdown()
    assert events == ["copied", "write True", "freed True", "done None"]
