"""Records, verdict, table and plot."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from rayrft.errors import StorageError
from rayrft.explorer.explorer import Timings
from rayrft.monitor.console import format_record
from rayrft.monitor.records import NoteRecord, Record, RecordFile, RolloutRecord, read_records
from rayrft.monitor.report import accuracy_table, save_plot
from rayrft.monitor.sinks import scalars
from rayrft.monitor.verdict import Bottleneck
from rayrft.pipelines.report import OperatorStats
from rayrft.rewards.scorer import DomainStats
from tests.monitor.made import evaluation, step


def test_records_survive_the_file_and_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    records: list[Record] = [NoteRecord("mix", 1, 0.0, "hello", {"a": 1}), step(), evaluation("mix", 3, 50)]
    assert read_records(tmp_path) == []
    file = RecordFile(tmp_path)
    for record in [*records, step()]:
        file.append(record)
    os.truncate(tmp_path / "metrics.jsonl", (tmp_path / "metrics.jsonl").stat().st_size - 40)
    assert read_records(tmp_path) == records
    again = RecordFile(tmp_path)
    again.append(step(step=4))
    assert read_records(tmp_path) == [*again.read()] == [*records, step(step=4)]
    assert [*again.read(1, 3)] == records[1:] and [*again.read(9)] == []
    cut = again.cut(1, records[2:])
    cut.append(step(step=5))
    assert read_records(tmp_path) == [*cut.read()] == [records[0], records[2], step(step=5)]


def test_a_disk_that_takes_half_a_record_is_a_storage_error_and_gets_the_record_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = RecordFile(tmp_path)
    lines.append(step())

    write, left = os.write, 10

    def full_after_ten_bytes(descriptor: int, data: bytes) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = write(descriptor, data[:left])
        left -= taken
        return taken

    with monkeypatch.context() as patch:
        patch.setattr("rayrft.json_lines.os.write", full_after_ten_bytes)
        with pytest.raises(StorageError) as error:
            lines.append(step(step=4))
    assert error.value.field == str(tmp_path / "metrics.jsonl")
    assert read_records(tmp_path) == [step()], "only whole lines"
    assert [*lines.read()] == [*lines.read(0, 9)] == [step(), step(step=4)] and [*lines.read(1, 1)] == []
    lines.append(step(step=5))
    assert read_records(tmp_path) == [*lines.read()] == [step(), step(step=4), step(step=5)]
    lines.close()


@pytest.mark.parametrize(
    ("times", "staleness", "said"),
    [
        (
            {"wait_s": 6.1, "rollout_s": 6, "train_s": 3},
            0,
            "waited 61% of the step: rollout-bound; add engines or raise",
        ),
        ({"wait_s": 6.1, "rollout_s": 6, "train_s": 3}, 2, "rollout-bound; add engines"),
        ({"wait_s": 6, "rollout_s": 1, "reward_s": 5, "train_s": 3}, 0, "reward-bound; raise reward.workers"),
        ({"wait_s": 1, "train_s": 8}, 0, "training took 80% of the step: trainer-bound"),
        ({"wait_s": 1, "train_s": 2, "sync_s": 7}, 0, "weight sync took 70% of the step: sync-bound"),
    ],
)
def test_the_verdict_names_the_bottleneck_and_the_remedy(times: dict[str, float], staleness: int, said: str) -> None:
    bottleneck = Bottleneck()
    for _ in range(3):
        bottleneck.add(step(**times))
    bottleneck.add(step(usual_rows=0, sync_s=1000))
    assert said in bottleneck.verdict(staleness)


def test_a_run_that_does_not_explore_is_not_told_to_add_engines_and_nothing_is_said_without_rollouts() -> None:
    bottleneck = Bottleneck()
    bottleneck.add(step(usual_rows=0))
    assert bottleneck.verdict(0) == ""
    bottleneck.add(step(wait_s=6.1, train_s=3))
    said = bottleneck.verdict(0, explores=False)
    assert "short of groups" in said and "engines" not in said


def test_a_step_line_shows_losses_staleness_and_where_the_time_went() -> None:
    losses, seconds = {"policy_loss": -0.5, "sft_loss": 0.25}, {"wait_s": 1, "train_s": 2, "sync_s": 3}
    text = format_record(step(expert_rows=2, staleness_max=1, **losses, **seconds))
    for part in ("[mix    3]", "reward 0.500", "policy -0.5000", "sft 0.2500", "stale 0.0/1", "wait 1.00", "sync 3.00"):
        assert part in text


def test_the_table_shows_each_stage_with_counts_intervals_and_its_best_point() -> None:
    points = [("warmup", 0, 0), ("warmup", 400, 20), ("control", 0, 20), ("control", 20, 60), ("control", 40, 40)]
    table = accuracy_table([evaluation(*point) for point in [*points, ("mix", 0, 20), ("mix", 10, 90)]])
    assert "untrained" in table
    assert "0.400 (40/100, 0.309-0.498), best 0.600 at step 20" in table
    assert "0.900 (90/100" in table


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    records: list[Record] = [evaluation("warmup", 0, 0), step(), evaluation("mix", 10, 90, step=10)]
    save_plot(records, tmp_path / "plot.png", "title")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_step_line_counts_what_was_lost_by_mistake_and_not_what_is_dropped_by_design() -> None:
    lost = {"workflow_error": 3, "zero_variance": 64, "rejected: token_ids is empty": 1}
    assert format_record(step(lost=lost)).endswith("lost 3 workflow_error, 1 rejected: token_ids is empty")
    assert "lost" not in format_record(step(lost={"zero_variance": 64, "late": 8}))


def test_new_failures_of_attempts_are_lines_below_the_step() -> None:
    problems = {"workflow_error": "it raised", "timeout": "it hung"}
    line, *below = format_record(step(lost={"workflow_error": 3}, problems=problems)).splitlines()
    assert line.endswith("lost 3 workflow_error") and below == ["  workflow_error: it raised", "  timeout: it hung"]


def test_what_an_explore_job_put_is_a_line_and_numbers_on_the_dashboard() -> None:
    lost = {"zero_variance": 8, "reward_unknown": 2, "worth: too low": 3, "worth: timeout": 8}
    timings = Timings(1.5, 0.25, operators={"worth": OperatorStats(64, 11, made=2, failed=8, seconds=0.5)})
    record = RolloutRecord("live", 24, 1.0, 8, 64, 640, 0.25, None, lost, 96, 320.0, 2.0, timings)
    line = format_record(record)
    assert line.startswith("[live    24 groups]  reward 0.250  320 tok/s  held 96")
    said = "left out 3 worth  made 2 worth  lost 2 reward_unknown, 8 worth: timeout"
    assert line.endswith(said), "what is by design is no mistake"
    numbers = scalars(record)
    assert numbers["rollout/tokens_per_s"] == 320.0 and "rollout/step" not in numbers
    assert numbers["rollout/operator_worth_failed"] == 8.0


@pytest.mark.parametrize(("domain", "name"), [("", "train/reward_"), ("code", "train/reward_code_")])
def test_scoring_a_domain_is_numbers_on_the_dashboard_and_unknown_rewards_on_the_line(domain: str, name: str) -> None:
    stats = DomainStats(scored=8, unknown=2, errors=1, retried=4, seconds=4.0, slowest_s=1.5, pending=3)
    record = step(rewards={domain: stats})
    assert format_record(record).endswith(f"unknown 2 rewards {domain}".strip())
    assert "(20 of 100, 95 % 0.133-0.289, 4 unknown)" in format_record(replace(evaluation("mix", 0, 20), unknown=4))
    numbers = scalars(record)
    said = {"unknown_share": 0.25, "mean_s": 0.5, "errors": 1, "retried": 4, "slowest_s": 1.5, "pending": 3}
    assert {each: numbers[name + each] for each in said} == said
