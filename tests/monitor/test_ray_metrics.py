"""The names of Ray's metrics are those that the README lists, and their values those of the records."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from rayrft.monitor import ray_metrics
from rayrft.monitor.ray_metrics import RayMetrics, measurements
from rayrft.monitor.records import NoteRecord, RestartRecord
from tests.core.given import run_folder
from tests.monitor.made import documented, every_record, step


class Exported:
    """What Ray gets: sums of counters and last values of gauges, by name and tags; and names that were set."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        self.kinds: defaultdict[str, set[str]] = defaultdict(set)
        self.set = threading.Semaphore(0)
        """Released when the first gauge is set."""

    def kind(self, name: str) -> type:
        exported = self

        class Metric:
            def __init__(self, metric: str, text: str, tag_keys: tuple[str, ...]) -> None:
                self._name, self._keys, self._default = metric, tag_keys, dict[str, str]()
                exported.kinds[metric].add(name)

            def set_default_tags(self, tags: dict[str, str]) -> Metric:
                self._default = tags
                return self

            def _key(self, tags: dict[str, str]) -> Any:
                assert {*self._default, *tags} == {*self._keys}, self._name  # Ray raises an error, too
                return self._name, frozenset({**self._default, **tags}.items())

            def inc(self, value: float, tags: dict[str, str]) -> None:
                assert value > 0
                exported.values[self._key(tags)] = exported.values.get(self._key(tags), 0) + value

            def set(self, value: float, tags: dict[str, str]) -> None:
                exported.values[self._key(tags)] = value
                if self._name == "rayrft_progress_timestamp_seconds":
                    exported.set.release()

        return Metric

    def all(self, sink: RayMetrics) -> dict[str, float]:
        """The values after two further exports, the first of which may have begun before."""
        for _ in range(2):
            while self.set.acquire(blocking=False):
                pass
            assert self.set.acquire(timeout=60)
        named = {(name, tags - {("run", "run")}): value for (name, tags), value in self.values.items()}
        return {
            name + "".join(f" {value}" for _, value in sorted(tags)): value for (name, tags), value in named.items()
        }


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exported]:
    found = Exported()
    monkeypatch.setattr(ray_metrics, "_EXPORT_S", 0.001)
    with (
        mock.patch("ray.util.metrics.Gauge", found.kind("gauge")),
        mock.patch("ray.util.metrics.Counter", found.kind("counter")),
    ):
        yield found


@pytest.fixture
def sink(tmp_path: Path, exported: Exported) -> Iterator[RayMetrics]:
    sink = RayMetrics(run_folder(tmp_path, "run"))
    yield sink
    sink.close(failed=False)


def test_the_readme_lists_every_name_and_counters_are_named_as_such(sink: RayMetrics, exported: Exported) -> None:
    for record in every_record():
        sink.write(record)
    exported.all(sink)
    assert {*exported.kinds} == documented()
    for name, kinds in exported.kinds.items():
        assert kinds == {"counter" if name.endswith("_total") else "gauge"}, name


def test_counters_add_up_and_gauges_are_those_of_the_last_step(sink: RayMetrics, exported: Exported) -> None:
    for number, tokens in ((1, 30), (2, 50)):
        sink.write(step(step=number, reward=number / 4, sampled_tokens=tokens, time=100.0 + number, wait_s=2.5))
    sink.write(RestartRecord("mix", 2, 200.0, "explorer", "run:explorer", "killed", 2.0))
    sink.write(RestartRecord("mix", 2, 203.0, "explorer", "run:explorer", "killed", 1.5))
    sink.write(NoteRecord("mix", 2, 300.0, "waits for an engine"))
    found = exported.all(sink)
    assert found["rayrft_train_steps_total"] == 2 and found["rayrft_train_sampled_tokens_total"] == 80
    assert found["rayrft_train_reward"] == 0.5 and found["rayrft_train_wait_seconds"] == 2.5
    assert found["rayrft_restarts_total explorer"] == 2 and found["rayrft_restart_seconds_total explorer"] == 3.5
    assert found["rayrft_progress_timestamp_seconds"] == 203.0  # a note is not progress


def test_a_number_that_is_not_finite_is_counted_and_its_gauge_ends(sink: RayMetrics, exported: Exported) -> None:
    sink.write(step(kl=0.25, time=1.0))
    exported.all(sink)
    sink.write(step(kl=float("nan"), loss=float("-inf"), time=2.0))
    found = exported.all(sink)
    assert found["rayrft_not_finite_total rayrft_train_kl"] == found["rayrft_not_finite_total rayrft_train_loss"] == 1
    exported.values.clear()
    assert "rayrft_train_grad_norm" in (found := exported.all(sink)) and "rayrft_train_kl" not in found


def test_gauges_are_exported_between_records_until_the_sink_is_closed(sink: RayMetrics, exported: Exported) -> None:
    others = {*threading.enumerate()}  # of recorders that other tests have left open
    sink.write(step())
    for _ in range(3):
        exported.values.clear()
        assert exported.all(sink)["rayrft_train_reward"] == 0.5
    [thread] = [each for each in threading.enumerate() if each.name == "ray-metrics" and each not in others]
    sink.close(failed=False)
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("changes", "staleness", "stall"),
    [
        ({"max_staleness": 2, "monitor": {"stall_s": 900.0}}, 2, 900.0),
        ({"mode": "train", "buffer": {"name": "b", "max_age": 5}}, 5, 1800.0),
    ],
)
def test_limits_are_those_of_the_config_and_of_its_changes(
    changes: dict[str, Any], staleness: int, stall: float, tmp_path: Path, exported: Exported
) -> None:
    sink = RayMetrics(run_folder(tmp_path, "run", **changes))
    sink.write(NoteRecord("mix", 0, 1.0, "the run starts"))
    found = exported.all(sink)
    assert (found["rayrft_limit_staleness"], found["rayrft_limit_stall_seconds"]) == (staleness, stall)
    assert (found["rayrft_limit_logprob_gap"], found["rayrft_limit_restarts_per_hour"]) == (1e-4, 20)
    for key, new in (("max_staleness", 3), ("monitor.stall_s", 60.0), ("monitor.patience_s", 5.0)):
        sink.write(NoteRecord("mix", 0, 1.0, f"{key}: … -> {new}", {"key": key, "old": 0, "new": new}))
    found = exported.all(sink)
    assert (found["rayrft_limit_staleness"], found["rayrft_limit_stall_seconds"]) == (3, 60.0)
    sink.close(failed=False)


def test_every_number_of_a_step_has_a_metric() -> None:
    """Also those of rewards, operators and the ledger, under the names of the config as tags."""
    [_, full, *_] = every_record()
    found = list(measurements(full))
    assert [(name, value) for name, value, tags in found if tags == {"reason": "stale"}] == [
        ("rayrft_ledger_dropped_rows", 3)
    ]
    assert {name for name, _, tags in found if tags == {"domain": "math"}} >= {"rayrft_reward_pending"}
    assert {name for name, _, tags in found if tags == {"operator": "longest"}} >= {"rayrft_operator_made_total"}
    assert len({(name, *tags.values()) for name, _, tags in found}) == len(found)
