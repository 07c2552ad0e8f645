"""A program for an interpreter that has Data-Juicer, and not rayrft: applies one of its operators to Arrow batches.

It reads requests from standard input and writes replies to what was standard output: a line of JSON each, followed by
``size`` bytes of an Arrow stream. Column `ROW` numbers rows, for an operator may leave out, repeat and reorder them.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from difflib import get_close_matches
from typing import Any, BinaryIO

import pyarrow as pa

ROW = "__row__"


def main() -> None:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what operators print must not stand between replies
    op: Any = None
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        try:
            if request["do"] == "start":
                op = _load(request["op"], request["options"])
                _reply(replies, {"version": importlib.import_module("data_juicer").__version__})
            else:
                with pa.ipc.open_stream(sys.stdin.buffer.read(request["size"])) as stream:
                    table = stream.read_all()
                _reply(replies, {}, _applied(op, table))
        except Exception as error:  # an operator may raise anything
            _reply(replies, {"error": f"{type(error).__name__}: {error}"[:2000]})


def _load(name: str, options: dict[str, Any]) -> Any:
    loader = importlib.import_module("data_juicer.utils.lazy_loader").LazyLoader
    loader._install_package = classmethod(_refuse)
    importlib.import_module("datasets").disable_progress_bars()
    importlib.import_module("datasets").disable_caching()
    importlib.import_module("loguru").logger.remove()
    base: Any = importlib.import_module("data_juicer.ops.base_op")
    base.free_models = lambda *_, **__: None  # they are needed for the next batch
    ops = importlib.import_module("data_juicer.ops")
    known = list(ops.OPERATORS.modules)
    if name not in known:
        raise LookupError(f"there is no operator {name!r}; near: {', '.join(get_close_matches(name, known)) or 'none'}")
    [op] = ops.load_ops([{name: options}])
    codes = [getattr(vars(kind).get("__init__"), "__code__", None) for kind in type(op).__mro__]
    taken = {each for code in codes if code is not None for each in code.co_varnames}
    if unknown := [each for each in options if each not in taken and not hasattr(op, each)]:  # it would say nothing
        raise TypeError(f"{name} has no option {unknown[0]!r}")
    op.runtime_np = lambda: None  # in this process: a pool of others costs more than it brings for a batch
    return op


def _refuse(cls: type, package: str, *_: Any, **__: Any) -> None:
    """In place of what installs a package that an operator needs, while it runs."""
    raise ImportError(f"it needs {package}, which is not installed beside Data-Juicer")


def _applied(op: Any, table: pa.Table) -> pa.Table:
    dataset = importlib.import_module("data_juicer.core.data").NestedDataset
    found = op.run(dataset(importlib.import_module("datasets").Dataset(table)))
    return found.with_format("arrow")[:].select(table.schema.names)


def _reply(replies: BinaryIO, reply: dict[str, Any], table: pa.Table | None = None) -> None:
    body = b""
    if table is not None:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        body = sink.getvalue().to_pybytes()
    replies.write(json.dumps({**reply, "size": len(body)}).encode() + b"\n" + body)
    replies.flush()


if __name__ == "__main__":
    main()
