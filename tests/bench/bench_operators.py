"""Operators per second beside the same functions in a loop and in `datasets.map`, and near-duplicates of many rows.

Rows are questions of GSM8K (``RAYRFT_TEST_DATA``), each with a number. All three are run in turn in this process, and
processor time counts. Near-duplicates are found in another process, whose memory beyond its imports is given; one row
in ten is planted. ``--workers`` are by the clock: a pipeline from rows in memory, with the start of its processes.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import pyarrow as pa
import ray

from rayrft.config.pipelines import OperatorConfig
from rayrft.pipelines import Context
from rayrft.pipelines.chain import apply_link, build_chain
from rayrft.pipelines.operators.clean import MaskPersonal, Normalise, StripMarkup
from rayrft.pipelines.operators.filters import LanguageMixing, Repetition
from rayrft.pipelines.run.host import OperatorHost, packed, unpacked
from rayrft.pipelines.run.process import Pipeline
from tests.bench.helpers import parse, race, spread, start_ray
from tests.pipelines.operators_on_real_data import originals

BATCH = 1000
TEXTS = {"normalise": Normalise, "strip_markup": StripMarkup, "mask_personal": MaskPersonal}
REASONS = {"repetition": Repetition, "language_mixing": LanguageMixing}


def table(count: int) -> pa.Table:
    """Rows with ids."""
    questions = [row.question for row in originals()[0] if "/train/" in row.id or "gsm8k" in row.id]
    return pa.table(
        {
            "id": [str(number) for number in range(count)],
            "question": [f"{questions[number % len(questions)]} ({number})" for number in range(count)],
        }
    )


def configs() -> list[OperatorConfig]:
    """The operators, on questions alone."""
    cleaning = [OperatorConfig(name=name, columns=["question"]) for name in TEXTS]
    return cleaning + [OperatorConfig(name=name, column="question") for name in REASONS]


def functions() -> list[tuple[Callable[[str], Any], bool]]:
    """The same functions by themselves, each with whether it changes the text."""
    found: list[tuple[Callable[[str], Any], bool]] = []
    for config in configs():
        piece: Any = TEXTS.get(config.name) or REASONS[config.name]
        operator = piece(piece.Options.model_validate(config.options), Context())
        cleans = config.name in TEXTS
        found.append((operator.change if cleans else operator.reason, cleans))
    return found


def by_rayrft(rows: pa.Table) -> int:
    build = partial(build_chain, configs(), rows.schema, field="", origin="", context=Context())
    host, count = OperatorHost(build, 0), 0
    for batch in rows.to_batches(BATCH):
        host.load(packed(batch))
        for number in range(len(configs())):
            host.apply(number)
        count += unpacked(host.result()).num_rows
    return count


def by_loop(rows: pa.Table) -> int:
    steps, kept = functions(), []
    for row in rows.to_pylist():
        for function, changes in steps:
            if changes:
                row["question"] = function(row["question"])
            elif function(row["question"]) is not None:
                break
        else:
            kept.append(row)
    return len(kept)


def by_datasets(rows: pa.Table) -> int:
    import datasets

    datasets.disable_caching()
    datasets.disable_progress_bars()
    data = datasets.Dataset(rows)
    for function, changes in functions():
        if changes:
            data = data.map(lambda row, function=function: {"question": function(row["question"])})
        else:
            data = data.filter(lambda row, function=function: function(row["question"]) is None)
    return len(data)


def near_rows(count: int) -> Iterator[pa.RecordBatch]:
    """Questions of three sentences of different ones, of which each tenth is an earlier one with a word replaced."""
    import random

    rng = random.Random(0)
    sentences = [part for row in originals()[0] if "/train/" in row.id for part in row.question.split(". ")]
    recent: list[str] = []
    for start in range(0, count, 10 * BATCH):
        texts = []
        for number in range(start, min(start + 10 * BATCH, count)):
            if number % 10 == 9:
                text = rng.choice(recent).replace(" the ", " that ", 1)
            else:
                text = ". ".join(rng.choices(sentences, k=3))
            recent = [*recent[-99:], text]
            texts.append(text)
        ids = [str(number) for number in range(start, start + len(texts))]
        yield pa.RecordBatch.from_pydict({"id": ids, "question": texts})


def find_near(count: int) -> tuple[list[float], int, float]:
    """Find near-duplicates among so many rows; return seconds by phase, rows left out and MiB of memory."""
    schema = pa.schema({"id": pa.string(), "question": pa.string()})
    build = partial(build_chain, [OperatorConfig(name="near_duplicates")], schema, field="", origin="")
    [link] = build(context=Context())
    for batch in near_rows(10):  # compile
        link.operator.observe(batch)
    link.operator.settle()
    [link] = build(context=Context())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = [0.0, 0.0, 0.0]

    def timed(phase: int, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        value = call()
        seconds[phase] += time.perf_counter() - start
        return value

    for batch in near_rows(count):
        timed(0, lambda batch=batch: link.operator.observe(batch))
    timed(1, link.operator.settle)
    gone = 0
    for batch in near_rows(count):
        gone += len(timed(2, lambda batch=batch: apply_link(link, batch, 0))[1].left_out)
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return seconds, gone, memory


def find_near_datasketch(count: int) -> tuple[float, int]:
    """Return seconds and rows left out by datasketch's MinHash and LSH, with as many permutations and word 3-grams."""
    from datasketch import MinHash, MinHashLSH

    texts = [text for batch in near_rows(count) for text in batch.column("question").to_pylist()]
    start = time.perf_counter()
    index, gone = MinHashLSH(threshold=0.6, num_perm=128), 0
    for number, text in enumerate(texts):
        words = text.lower().split()
        signature = MinHash(num_perm=128)
        signature.update_batch([" ".join(words[place : place + 3]).encode() for place in range(max(1, len(words) - 2))])
        if index.query(signature):
            gone += 1
        else:
            index.insert(number, signature)
    return time.perf_counter() - start, gone


def by_workers(rows: pa.Table, operators: list[OperatorConfig], workers: int) -> float:
    """Return rows per second, by the clock."""
    pipeline, start = Pipeline(operators, rows.schema, workers=workers, samples=0), time.perf_counter()
    pipeline.run(rows.to_batches(BATCH), lambda batch: None)
    return rows.num_rows / (time.perf_counter() - start)


def main() -> None:
    """Print the figures."""
    options = parse(
        __doc__,
        rows=100_000,
        rounds=3,
        near=[100_000, 1_000_000],
        datasketch=(10_000, "rows for datasketch, if it is installed; 0: none"),
        workers=[1, 2],
    )
    if options.rows:
        rows, kept = table(options.rows), dict[str, int]()
        ways = {"rayrft": by_rayrft, "plain loop": by_loop, "datasets.map": by_datasets}

        def apply(name: str) -> None:
            kept[name] = ways[name](rows)

        timed = {name: partial(apply, name) for name in ways}
        for name, times in race(timed, options.rounds).items():
            print(f"{name}: {spread(options.rows / times[:, 1], ',.0f')} rows/s, {kept[name]:,} kept", flush=True)
    if options.workers:
        start_ray(2)
        many = {"five cheap ones": configs(), "language": [OperatorConfig(name="language", column="question")]}
        for name, operators in many.items():
            rows = table(options.rows if name != "language" else options.rows // 10)
            for workers in options.workers:
                rate = by_workers(rows, operators, workers)
                print(f"{name}, {rows.num_rows:,} rows, workers {workers}: {rate:,.0f} rows/s", flush=True)
        ray.shutdown()
    for count in options.near:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            seconds, gone, memory = process.submit(find_near, count).result()
        phases = "observe {:.1f}, settle {:.1f}, apply {:.1f}".format(*seconds)
        took = f"{sum(seconds):.1f} s ({phases})"
        print(f"near-duplicates of {count:,} rows: {took}, {gone:,} left out, {memory:,.0f} MiB")
    if options.datasketch:
        try:
            took_s, gone = find_near_datasketch(options.datasketch)
        except ImportError:
            print("datasketch is not installed")
        else:
            print(f"datasketch, {options.datasketch:,} rows: {took_s:.1f} s, {gone:,} left out")


if __name__ == "__main__":
    main()
