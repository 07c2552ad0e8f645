"""Files that register pieces of one's own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rayrft.algorithms import Denominators, GroupFacts, policy_losses
from rayrft.buffer.samplers import samplers
from rayrft.config import load_config
from rayrft.config.load import dump_config
from rayrft.core.run_folder import open_folder, write_config
from rayrft.data.task_sources import task_sources
from rayrft.errors import ConfigError
from rayrft.registry import Registry, load_plugins
from tests.algorithms.flat import LOG2, leaf, make_batch, output
from tests.config.given import base
from tests.conftest import ROOT
from tests.errors import about

EXAMPLE = ROOT / "jobs" / "plugins" / "my_loss.py"


def piece(function: str, name: str = "a_test_piece", imports: str = "") -> str:
    """The source of a plugin that registers a policy loss."""
    imports = f"from rayrft.algorithms import TokenLoss, policy_losses\n{imports}\n"
    return f"{imports}@policy_losses.register({name!r})\n{function}\n"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What a test's own files register is not there for the others."""
    yield
    forget()


def forget() -> None:
    for name in ("a_test_piece", "another_piece", "no_default"):
        policy_losses._functions._pieces.pop(name, None)


def run_with(*plugins: Path, **algorithm: Any) -> dict[str, Any]:
    stage = {"name": "s", "steps": 1, "batch_size": 40, "group_size": 8, "algorithm": {"name": "grpo", **algorithm}}
    return {**base(), "stages": [stage], "plugins": [str(path) for path in plugins]}


def test_the_example_runs_as_it_says() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 40
    config = load_config(run_with(EXAMPLE, policy_loss="tanh_ratio", advantage="above_median", sharpness=4.0))
    algorithm = config.stages[0].algorithm.build()
    assert algorithm.group_advantages(torch.tensor([1.0, 0.0, 5.0]), GroupFacts()).tolist() == [0.0, -1.0, 4.0]
    # Ratios 1 and 2, advantages 1: -(0 + tanh(4) / 4) / 2
    batch = make_batch([[-1.0], [-1.0]], [[1.0], [1.0]])
    parts = algorithm.loss(output(leaf([[-1.0], [-1.0 + LOG2]])), batch, Denominators(2, 2))
    assert parts.loss.item() == pytest.approx(-torch.tanh(torch.tensor(4.0)).item() / 8)
    assert config.plugins == [EXAMPLE], "absolute, for actors have another working directory"
    assert str(EXAMPLE) in dump_config(config)


def test_a_run_keeps_copies_of_its_plugins_which_are_found_where_these_are_gone(tmp_path: Path) -> None:
    source = piece("def loss(logprobs, batch): return TokenLoss(-batch.advantages)")
    cache = tmp_path / "cache" / "piece.py"
    cache.parent.mkdir()
    cache.write_text(source)
    config = load_config(run_with(EXAMPLE, cache, policy_loss="a_test_piece"), {"storage": str(tmp_path / "runs")})
    open_folder(config)
    assert load_config(config.folder / "config.yaml").plugins == [EXAMPLE, cache], "they are where they were"
    cache.write_text(source + "# fixed\n")
    write_config(config)
    cache.unlink()
    policy_losses._functions._pieces.pop("a_test_piece")  # as in a later process
    moved = config.folder.rename(tmp_path / "elsewhere")
    found = load_config(moved / "config.yaml", {"storage": str(tmp_path), "name": "elsewhere"})
    [copy] = moved.glob("plugins/1-*")
    assert found.plugins == [EXAMPLE, copy] and copy.read_text().endswith("# fixed\n")
    write_config(found)
    assert load_config(moved / "config.yaml").plugins == [EXAMPLE, copy]


def test_coefficients_of_ones_own_pieces_are_checked_like_any_other() -> None:
    with pytest.raises(ConfigError, check=about("stages.s.algorithm.sharpness", -1)):
        load_config(run_with(EXAMPLE, policy_loss="tanh_ratio", sharpness=-1))
    with pytest.raises(ConfigError, check=about("stages.s.algorithm.sharpnes", "sharpnes")):
        load_config(run_with(EXAMPLE, policy_loss="tanh_ratio", sharpnes=1))


def test_a_file_is_run_again_only_when_it_changed(tmp_path: Path) -> None:
    path = tmp_path / "piece.py"
    source = piece("def mine(logprobs, batch, *, factor: float = {}): return TokenLoss(-factor * logprobs)")
    path.write_text(source.format(2.0))
    load_plugins([path])
    first = policy_losses.get("a_test_piece").function
    load_plugins([path])
    assert policy_losses.get("a_test_piece").function is first
    path.write_text(source.format(3.0))
    load_plugins([path])
    assert policy_losses.get("a_test_piece").coefficients == {"factor": 3.0}


def test_plugins_import_each_other_and_what_lies_beside_them_in_any_order(tmp_path: Path) -> None:
    (tmp_path / "beside_plugins.py").write_text("FACTOR = 2.0\n")
    beside, imported = "from beside_plugins import FACTOR", "from first_plugin import mine"
    mine = piece("def mine(logprobs, batch): return TokenLoss(-FACTOR * logprobs)", imports=beside)
    (first := tmp_path / "first_plugin.py").write_text(mine)
    other = piece("def other(logprobs, batch): return mine(logprobs, batch)", "another_piece", imported)
    (second := tmp_path / "second_plugin.py").write_text(other)
    for order in ([first, second], [second, first]):
        load_plugins(order)
        logprobs = torch.tensor([1.0])
        for name in ("a_test_piece", "another_piece"):
            assert policy_losses.get(name).function(logprobs, None).values.tolist() == [-2.0]
        forget()  # as in another process
        for name in [name for name in sys.modules if name.endswith("_plugin") or "_plugin_" in name]:
            del sys.modules[name]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, r"plugins: cannot be read: No such file or directory \(found '.*piece\.py'\)"),
        ("1 / 0", r"plugins: cannot be loaded: ZeroDivisionError: division by zero \(found '.*piece\.py'\)"),
        ("def f(:", r"plugins: cannot be loaded: SyntaxError: "),
        (piece("def ppo(a, b): ...", "ppo"), r"cannot be loaded: ConfigError: policy_loss: .* exists \(found 'ppo'\)"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_named_with_the_cause(source: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "piece.py"
    if source is not None:
        path.write_text(source)
    for _ in range(2):  # the failure is not remembered as a success
        with pytest.raises(ConfigError, match=message):
            load_config(run_with(path))


def too_few(one: object) -> None:
    """A piece of no kind that takes several."""


@pytest.mark.parametrize("pieces", [samplers, task_sources, policy_losses], ids=lambda pieces: pieces.kind)
def test_a_function_that_cannot_be_called_as_its_kind_is_refused_when_it_is_looked_up(pieces: Any) -> None:
    with pytest.raises(ConfigError, match="cannot be called") as refused:
        pieces.get(f"{__name__}:too_few")
    assert refused.value.value == f"{__name__}:too_few"
    for name in pieces:
        assert pieces.get(name)


def test_a_coefficient_without_a_default_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "piece.py"
    path.write_text(piece("def mine(logprobs, batch, *, factor: float): ...", "no_default"))
    with pytest.raises(ConfigError, check=about("stages.s.mine.factor")):
        load_config(run_with(path, policy_loss="no_default"))


def test_plugins_that_are_not_a_list_of_paths_are_refused() -> None:
    with pytest.raises(ConfigError, check=about("plugins")):
        load_config({**run_with(), "plugins": str(EXAMPLE)})


def test_a_name_can_be_taken_again_by_the_same_definition_only() -> None:
    registry: Registry[Any] = Registry("thing")

    def define(value: int) -> Any:
        def thing() -> int:
            return value

        return thing

    registry.register("a")(define(1))
    registry.register("a")(define(2))
    assert registry.get("a")() == 2
    with pytest.raises(ConfigError, check=about("thing", "a")):
        registry.register("a")(lambda: 3)
    registry.register("b")(GroupFacts())
    with pytest.raises(ConfigError, check=about("thing", "b")):
        registry.register("b")(GroupFacts())
