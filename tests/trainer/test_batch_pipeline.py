"""From a lease to the batch that is trained: rebalanced, cut, masked and reweighted, and the same each time."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rayrft.algorithms import build
from rayrft.buffer.leases import Lease
from rayrft.config import RunConfig, load_config
from rayrft.errors import ConfigError, OperatorFailed
from rayrft.experience import Experience, pack, to_batch
from rayrft.trainer.batch_pipeline import BatchPipeline, ProcessedLease, batch_chain, check_batches
from rayrft.trainer.batches import TrainRow, fetch_mini_batches, fetch_rows
from tests.buffer.in_process import LocalBuffer, small
from tests.buffer.rows import expert_rows, group, pairs, plan
from tests.e2e.conftest import small_config

pytestmark = pytest.mark.usefixtures("forked_templates")

PLUGIN = Path(__file__).with_name("on_batches.py")
GRPO = build("grpo")


class Ref:
    """Stands for a reference to a block: awaited, it gives the message."""

    def __init__(self, message: pa.Buffer) -> None:
        self.message = pa.py_buffer(message.to_pybytes())

    def __await__(self) -> Generator[Any, None, pa.Buffer]:
        yield from asyncio.sleep(0).__await__()
        return self.message


@pytest.fixture
def buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalBuffer]:
    monkeypatch.setattr("ray.put", Ref)
    monkeypatch.setattr("ray.get", lambda refs: [ref.message for ref in refs])
    local = LocalBuffer(tmp_path, small(max_rows=10_000, max_bytes=1 << 30, memory_bytes=1 << 30, segment_bytes=1500))
    yield local
    local.kill()


def of_length(row: Experience, length: int) -> Experience:
    ids, mask = np.full(length, row.token_ids[0], np.int32), np.array([0] + [1] * (length - 1), np.uint8)
    return replace(row, token_ids=ids, action_mask=mask, logprobs=np.zeros(length, np.float32))


def fill(
    buffer: LocalBuffer, gold: list[Experience] | None = None, lengths: Sequence[int] | None = None, **changes: Any
) -> None:
    """Groups 1 to 8 of two rows with rewards 0 and 1, and demonstrations; a step takes four and six."""
    given = expert_rows(6) if gold is None else gold
    buffer.do("load", "given", [pack(to_batch(given))])
    changes = {"expert_rows": 6, "demonstrations": "given", "scheduled": False, "mini_batches": 2} | changes
    buffer.do("open_stage", plan(changes.pop("groups", 4), **changes))
    lengths = [6] * 8 if lengths is None else lengths
    buffer.put([(group(number, length=int(length)), None) for number, length in enumerate(lengths, start=1)])


def lease(buffer: LocalBuffer, step: int = 0, ranks: int = 2) -> Lease:
    found = buffer.do("lease", step, ranks, 0)
    assert isinstance(found, Lease), found
    return found


def settings_of(operators: list[Any], **settings: Any) -> RunConfig:
    pipelines = {f"pipelines.{name}": value for name, value in {"batch": operators, **settings}.items()}
    return load_config(small_config(Path("unused"), "batches"), {"plugins": [str(PLUGIN)], **pipelines})


def process(leases: list[Lease], *operators: Any, **settings: Any) -> list[ProcessedLease]:
    """What these operators make of leases, one after another, until they raise."""
    made, error = attempt(leases, *operators, **settings)
    assert error is None, error
    return made


def attempt(leases: list[Lease], *operators: Any, **rest: Any) -> tuple[list[ProcessedLease], OperatorFailed | None]:
    """The same, and what they raise."""
    named = [{"name": each} if isinstance(each, str) else each for each in operators]
    config = settings_of(named, **rest)
    made: list[ProcessedLease] = []

    async def all_of_them() -> OperatorFailed | None:
        pipeline = BatchPipeline(config.pipelines, batch_chain(config, None))
        await pipeline.operators.open()
        try:
            for each in leases:
                made.append(await pipeline.process(each))
        except OperatorFailed as error:
            return error
        finally:
            await pipeline.operators.close()
        return None

    return made, asyncio.run(all_of_them())


def rows(of: Lease) -> dict[str, TrainRow]:
    """The rows that are trained, by id."""
    found = [row for share in of.shares for row in fetch_rows(share, GRPO)]
    assert len(found) == of.usual_rows + of.expert_rows
    return {row.experience: row for row in found}


def mini_batches(of: Lease) -> list[set[str]]:
    """The ids of their rows, over all ranks."""
    dealt = [fetch_mini_batches(share, GRPO) for share in of.shares]
    return [{row.experience for rows in parts for row in rows} for parts in zip(*dealt, strict=True)]


def alike(one: dict[str, TrainRow], other: dict[str, TrainRow]) -> bool:
    names = ("token_ids", "mask", "advantages", "weight")
    return one.keys() == other.keys() and all(
        np.array_equal(getattr(row, name), getattr(other[key], name)) for key, row in one.items() for name in names
    )


def test_operators_that_change_nothing_but_the_order_leave_the_batch_what_it_is(buffer: LocalBuffer) -> None:
    fill(buffer)
    before = [lease(buffer, ranks=ranks) for ranks in (1, 2, 3)]
    after = process(before, {"name": "truncate", "max_tokens": 100}, "whole_batch", "turns_round")
    for given, made in zip(before, after, strict=True):
        assert alike(rows(given), rows(made.lease)) and made.problem is None
        assert len(made.lease.shares) == len(given.shares) and made.lease.staleness == given.staleness
        assert mini_batches(given) == mini_batches(made.lease)


@pytest.mark.parametrize("share, usual, expert", [(0.2, 8, 2), (0.6, 4, 6)])
def test_expert_rows_get_their_share_on_any_ranks(buffer: LocalBuffer, share: float, usual: int, expert: int) -> None:
    rng = np.random.default_rng(0)
    gold = [of_length(row, int(rng.integers(4, 40))) for row in expert_rows(6)]
    fill(buffer, gold, lengths=rng.integers(4, 40, 8).tolist())
    leases = [lease(buffer, 0, ranks) for ranks in (1, 2, 3, 5)]
    made = process([*leases, leases[0], lease(buffer, 1)], {"name": "rebalance", "expert_share": share})
    assert [(each.lease.usual_rows, each.lease.expert_rows) for each in made] == [(usual, expert)] * 6
    ids = [set(rows(each.lease)) for each in made]
    assert ids[0] == ids[1] == ids[2] == ids[3] == ids[4], "the same step, by other ranks and again"
    stats = made[0].operators["rebalance"]
    assert (stats.taken, stats.left_out) == (14, 14 - usual - expert)


@pytest.mark.parametrize(
    "operator",
    [
        {"name": "expression", "where": "source = 'expert' or reward > 0.5"},
        {"name": "mask_turns", "turns": [-1], "where": "reward < 0.5"},
    ],
    ids=["left out", "nothing left to train"],
)
def test_a_row_that_is_left_out_counts_in_its_groups_advantages(buffer: LocalBuffer, operator: dict[str, Any]) -> None:
    fill(buffer)
    given = lease(buffer)
    [made] = process([given], operator)
    whole, kept = rows(given), rows(made.lease)
    assert (made.lease.usual_rows, made.lease.expert_rows, made.problem) == (4, 6, None)
    assert all(key.endswith("/1") for key in kept if not key.startswith("90"))
    assert all(np.array_equal(kept[key].advantages, whole[key].advantages) for key in kept)
    assert any(row.advantages.any() for row in kept.values())


def test_rows_are_cut_and_rewards_stay_those_of_the_whole_answers(buffer: LocalBuffer) -> None:
    fill(buffer)
    given = lease(buffer)
    [made] = process([given], {"name": "truncate", "max_tokens": 3})
    whole, cut = rows(given), rows(made.lease)
    assert whole.keys() == cut.keys()
    for key, row in cut.items():
        assert row.token_ids.tolist() == whole[key].token_ids[:3].tolist() and len(row.mask) == len(row.logprobs) == 3
        assert row.reward == whole[key].reward and np.array_equal(row.advantages, whole[key].advantages[:3])


def test_turns_are_excluded_from_the_loss(buffer: LocalBuffer) -> None:
    fill(buffer, groups=1, expert_rows=0, mini_batches=1)
    mask = np.array([0, 1, 1, 0, 1, 1], np.uint8)
    taken = [replace(row, action_mask=mask, logprobs=-mask.astype(np.float32)) for row in group(20, length=6)]
    buffer.put([(taken, None)])
    found = next(each for step in range(9) if "20/0" in rows(each := lease(buffer, step)))
    [made] = process([found], {"name": "mask_turns", "turns": [0]})
    for row in rows(made.lease).values():
        assert row.mask.tolist() == [0, 0, 0, 0, 1, 1] and row.logprobs.tolist() == [0, 0, 0, 0, -1, -1]


def test_weights_are_multiplied_of_own_and_of_expert_rows(buffer: LocalBuffer) -> None:
    fill(buffer)
    half = {"name": "reweight", "by": 0.5, "where": "source = 'expert'"}
    by_priority = {"name": "reweight", "by": "priority", "where": "reward > 0.5"}
    [made] = process([lease(buffer)], half, "priority_two", by_priority)
    weights = {key: row.weight for key, row in rows(made.lease).items()}
    kinds = {key: "expert" if key.startswith("90") else key[-1] for key in weights}  # or its reward
    assert {(kinds[key], weight) for key, weight in weights.items()} == {("expert", 0.5), ("1", 2.0), ("0", 1.0)}


@pytest.mark.parametrize("side", ["given/1/0", "given/1/1"])
def test_a_pair_is_left_out_whole(buffer: LocalBuffer, side: str) -> None:
    fill(buffer, pairs(4), groups=0, expert_rows=8, pairs=True, mini_batches=1)
    given = lease(buffer)
    [made] = process([given], {"name": "expression", "where": f"experience_id <> '{side}'"})
    assert sorted(rows(made.lease)) == sorted(set(rows(given)) - {"given/1/0", "given/1/1"})
    numbers = [row.pair for share in made.lease.shares for row in fetch_rows(share, build("dpo"))]
    assert None not in numbers and all(numbers[at] == numbers[at + 1] for at in range(0, len(numbers), 2))


@pytest.mark.parametrize(
    "operator, problem",
    [
        ("other_tokens", "may only truncate token_ids"),
        ("other_places", "there twice"),
        ("other_sources", "'source'"),
        ("negative_weights", "negative or not finite"),
        ("nothing_left", "left no row of the batch"),
        ("dies_at_step_zero", "exit code 7"),
        ("longer_masks", "action_mask and token_ids differ in length"),
    ],
)
def test_two_spoilt_batches_train_as_given_a_third_fails(buffer: LocalBuffer, operator: str, problem: str) -> None:
    fill(buffer)
    given = lease(buffer)
    made, error = attempt([given] * 3, operator)
    assert [each.lease for each in made] == [given] * 2 and all(problem in str(each.problem) for each in made)
    assert problem in str(error)


def test_batches_that_are_spoilt_now_and_then_do_not_end_the_run_unless_that_is_wanted(buffer: LocalBuffer) -> None:
    fill(buffer)
    spoilt, fine = lease(buffer, 0), lease(buffer, 1)
    made, error = attempt([spoilt, spoilt, fine, spoilt, spoilt], "dies_at_step_zero")
    assert error is None and [each.problem is None for each in made] == [False, False, True, False, False]
    made, error = attempt([spoilt], "other_tokens", on_error="stop")
    assert not made and "may only truncate token_ids" in str(error), "at once, if that is wanted"


def test_a_row_that_is_to_stand_alone_still_does(buffer: LocalBuffer) -> None:
    fill(buffer)
    blamed = next(key for key in rows(lease(buffer)) if not key.startswith("90"))
    buffer.do("blame", 0, "first life", [blamed])
    [made] = process([lease(buffer)], {"name": "truncate", "max_tokens": 5})
    alone = {key for key, row in rows(made.lease).items() if row.alone}
    assert alone == {key for key in rows(lease(buffer)) if key.startswith(blamed.partition("/")[0] + "/")}


def test_a_row_on_which_an_operator_raises_is_left_out_and_told(buffer: LocalBuffer) -> None:
    fill(buffer)
    [made] = process([lease(buffer)], "raises_on_zero")
    assert made.lease.usual_rows == 4 and "no such thing" in str(made.problem)
    assert made.operators["raises_on_zero"].failed == 4


@pytest.mark.parametrize(
    "operator, problem",
    [
        ({"name": "best_against_worst"}, "makes rows"),
        ({"name": "mask_turns", "turns": [0], "where": "rewad > 0"}, "not a valid condition"),
        ({"name": "reweight", "by": -1.0}, "is not a factor"),
        ({"name": "reweight", "by": "nothing"}, "needs a column"),
        ({"name": "rebalance", "expert_share": 1.0}, "less than 1"),
        ({"name": "says_other_ids"}, "what was sampled"),
    ],
)
def test_operators_that_do_not_fit_are_refused_before_anything_starts(operator: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_batches(settings_of([operator]), None)
