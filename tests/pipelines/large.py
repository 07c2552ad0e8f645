"""A pipeline on a generated Parquet file of any size, and the memory that it took.

    python -m tests.pipelines.large FOLDER MIB WORKERS

Prints as JSON the rows written, the MiB by which this process and its largest child grew, and seconds. With more than
one worker Ray has an object store of 100 MiB.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayrft.config import PipelineConfig
from rayrft.data.tables import open_table
from rayrft.pipelines.files import process

OPERATORS = [
    {"name": "expression", "where": "number % 7 != 3"},
    {"name": "exact_duplicates", "columns": ["question"]},
    {"name": "expression", "where": "len(question) > 10"},
]
KEPT = {number for number in range(7) if number != 3}


def write(path: Path, mib: int) -> int:
    """Write a file of about so many MiB, 1 KiB a row; return the number of rows."""
    rng = np.random.default_rng(0)
    schema = pa.schema({"number": pa.int64(), "question": pa.string()})
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for start in range(0, mib * 1024, 1024):
            letters = rng.integers(97, 123, (1024, 1000), dtype=np.uint8)
            letters[:, ::8] = 32
            texts = [row.tobytes().decode() for row in letters]
            writer.write_table(pa.table([list(range(start, start + 1024)), texts], schema=schema))
    return mib * 1024


def own_memory() -> float:
    """Return MiB that this process has allocated; mapped files are not among them."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) / 1024


def main() -> None:
    folder, mib, workers = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rows = write(folder / "in.parquet", mib)
    if workers > 1:
        import ray

        ray.init(
            address="local", num_cpus=4, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False
        )
    config = PipelineConfig.model_validate({"operators": OPERATORS, "workers": workers, "samples": 0})
    source, before, start = open_table(folder / "in.parquet"), own_memory(), time.time()
    most = before

    def progress(operator: int, taken: int) -> None:
        nonlocal most
        most = max(most, own_memory())

    done = process([source], config, folder / "out.parquet", progress=progress)
    numbers = pq.read_table(folder / "out.parquet", columns=["number"])["number"].to_numpy()
    expected = [number for number in range(rows) if number % 7 in KEPT]
    assert numbers.tolist() == expected, "the rows that are left, in their order"
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    found = {"rows": done.rows, "grown": most - before, "child": child, "seconds": time.time() - start}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
