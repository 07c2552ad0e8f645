"""Gymnasium environments with a few named actions, rendered as text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from rayrft.data.reasoning import split_reasoning
from rayrft.errors import ConfigError
from rayrft.experience import Task
from rayrft.explorer.environments.base import Step, register_environment
from rayrft.registry import Lazy, check_installed

if TYPE_CHECKING:
    import gymnasium
else:
    gymnasium = Lazy("gymnasium")

_DEFAULT = "FrozenLake-v1"
_COLOURED = re.compile(r"\x1b\[[\d;]*m(.*?)\x1b\[0m", re.DOTALL)


@dataclass(frozen=True)
class TextRenderer:
    """How an environment is rendered as text: its rules, its map and its state, and by which words an action can be
    named."""

    rules: str
    actions: tuple[tuple[str, ...], ...]
    """By number, the words for each, of which the first is shown."""
    map: Callable[[Any], str]
    """The map of an environment in its present state; empty if there is none."""
    state: Callable[[Any], str]


@register_environment("gymnasium")
class GymnasiumEnvironment:
    """An environment of Gymnasium whose actions are discrete, by its ``id``.

    With an ``id`` it is made before an attempt asks for it; without, tasks name theirs, or it is FrozenLake.

    FrozenLake, Taxi and CliffWalking have a text of their own; others show what they render as text, or else by
    their observation, and ``actions`` names theirs. ``options`` go to ``gymnasium.make``; the ice of FrozenLake is not
    slippery unless they say so. ``show_map``: with every observation or with the first alone.

    An action is found by its last mention in the answer, or in its ``<answer>`` if it has one. An answer without any
    does nothing, earns ``invalid_reward`` and counts as metric ``invalid_actions``.

    A task may have options of its own, such as a map, in ``metadata["environment"]``: ``desc: [SFF, FHF, FFG]``. Its
    ``seed`` there fixes the start of the episode.
    """

    def __init__(
        self,
        id: str | None = None,
        options: dict[str, Any] | None = None,
        actions: list[str] | None = None,
        invalid_reward: float = 0.0,
        show_map: Literal["every", "first"] = "every",
    ) -> None:
        self._id, self._options, self._actions = id or _DEFAULT, options or {}, actions
        self._invalid_reward, self._show_map = invalid_reward, show_map
        self._env: gymnasium.Env[Any, Any] | None = None
        self._made: tuple[str, dict[str, Any]] | None = None
        """By what id and options the environment was made."""
        if id is not None:
            self._open(id, {})  # before an attempt waits for it

    @staticmethod
    def check(id: str = _DEFAULT, **_: Any) -> None:
        """Raise ConfigError unless Gymnasium is installed and knows the environment."""
        extra = "pip install 'rayrft[gymnasium]'"
        check_installed("gymnasium", extra, ConfigError, "explorer.environment.name", "gymnasium")
        try:
            gymnasium.spec(id)
        except gymnasium.error.Error as error:
            field = "explorer.environment.options.id"
            raise ConfigError(str(error), "see gymnasium.pprint_registry()", field=field, value=id) from None

    prepare = check

    def reset(self, task: Task, seed: int) -> str:
        own = dict(task.metadata.get("environment", {}))
        seed = own.pop("seed", seed)
        self._open(own.pop("id", self._id), own)
        assert self._env is not None
        self._observation, _ = self._env.reset(seed=seed)
        return self._text(self._text_renderer.rules, self._named_actions, first=True)

    def step(self, action: str) -> Step:
        assert self._env is not None, "reset() comes first"
        number = find_action(action, self._text_renderer.actions)
        if number is None:
            text = self._text("That is not an action.", self._named_actions)
            return Step(text, reward=self._invalid_reward, info={"invalid_actions": 1})
        self._observation, reward, terminated, truncated, _ = self._env.step(self._first + number)
        return Step(self._text(), reward=float(reward), done=bool(terminated or truncated))

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = self._made = None

    def _open(self, id: str, own: dict[str, Any]) -> None:
        """Make the environment with a task's own options, unless it is made with them."""
        options = {**self._options, **own}
        if id.startswith("FrozenLake"):
            options = {"is_slippery": False, **options}
        if self._made == (id, options):
            return
        self.close()
        self._env = _make(id, options)
        if not isinstance(self._env.action_space, gymnasium.spaces.Discrete):
            raise TypeError(f"the actions of {id} are {self._env.action_space}, not discrete")
        self._first = int(self._env.action_space.start)
        self._text_renderer = _text_renderer(self._env, id, self._actions)
        self._made = id, options

    @property
    def _named_actions(self) -> str:
        return f"Actions: {', '.join(words[0] for words in self._text_renderer.actions)}."

    def _text(self, *lines: str, first: bool = False) -> str:
        """Return lines, then the map, if it is shown with this observation, and the state."""
        renderer = self._text_renderer
        grid = renderer.map(self._env) if first or self._show_map == "every" else ""
        state = renderer.state(self._env) or f"Observation: {self._observation}"
        return "\n".join(filter(None, [*lines, grid, state]))


def find_action(answer: str, actions: tuple[tuple[str, ...], ...]) -> int | None:
    """Return the number of the action that the answer mentions last, in its ``<answer>`` if it has one."""
    answer = split_reasoning(answer)[1]
    tagged = re.findall(r"<answer>(.*?)(?:</answer>|$)", answer, re.DOTALL | re.IGNORECASE)
    text = (tagged[-1] if tagged else answer).lower()
    last = [
        (found.end(), len(word), number)  # "pick up" is not "up"
        for number, words in enumerate(actions)
        for word in words
        for found in re.finditer(rf"(?<![\w-]){re.escape(word.lower())}(?!\w)", text)
    ]
    return max(last)[2] if last else None


def _make(id: str, options: dict[str, Any]) -> Any:
    env = gymnasium.make(id, disable_env_checker=True, **options)
    if _known(id) is None and "ansi" in env.metadata.get("render_modes", []):
        env.close()
        env = gymnasium.make(id, disable_env_checker=True, **{"render_mode": "ansi", **options})
    return env


def _known(id: str) -> TextRenderer | None:
    """Return the renderer of an id, such as that of FrozenLake for ``FrozenLake8x8-v1``, or None."""
    return next((renderer for name, renderer in _RENDERERS.items() if id.rpartition("/")[2].startswith(name)), None)


def _text_renderer(env: Any, id: str, actions: list[str] | None) -> TextRenderer:
    known = _known(id)
    if actions is None and known is not None:
        return known
    size = int(env.action_space.n)
    names = actions or [str(number) for number in range(size)]
    if len(names) != size:
        raise ValueError(f"{id} has {size} actions, and {len(names)} are named")
    renderer = known or TextRenderer("", (), _rendered, lambda _: "")
    return replace(renderer, actions=tuple((name,) for name in names))


def _rendered(env: Any) -> str:
    """What it renders as text; what is coloured, such as where the player is, stands in brackets."""
    if env.render_mode != "ansi":
        return ""
    return _COLOURED.sub(lambda found: f"[{found[1]}]", str(env.render())).strip("\n")


def _grid(rows: list[list[str]], at: tuple[int, int], player: str = "P") -> str:
    row, column = at
    rows[row][column] = player
    return "\n".join("".join(row) for row in rows)


def _at(row: int, column: int) -> str:
    return f"row {row + 1}, column {column + 1}"


def _lake_map(env: Any) -> str:
    rows = [[tile.decode() for tile in row] for row in env.unwrapped.desc]
    return _grid(rows, divmod(int(env.unwrapped.s), len(rows[0])))


def _lake_state(env: Any) -> str:
    lake = env.unwrapped
    row, column = divmod(int(lake.s), lake.ncol)
    end = {b"H": " You fell into a hole.", b"G": " You reached the goal."}.get(lake.desc[row, column], "")
    return f"You are at {_at(row, column)}.{end}"


def _cliff_map(env: Any) -> str:
    cliff = env.unwrapped
    rows = [["C" if cell else "." for cell in row] for row in cliff._cliff]
    rows[-1][-1] = "G"
    return _grid(rows, divmod(int(cliff.s), cliff.shape[1]))


_STANDS = ("Red", "Green", "Yellow", "Blue")


def _taxi_map(env: Any) -> str:
    taxi = env.unwrapped
    row, column, _, _ = taxi.decode(taxi.s)
    return _grid([[cell.decode() for cell in line] for line in taxi.desc], (row + 1, 2 * column + 1), "T")


def _taxi_state(env: Any) -> str:
    taxi = env.unwrapped
    row, column, passenger, goal = (int(each) for each in taxi.decode(taxi.s))
    where = f"at {_STANDS[passenger]} ({_at(*taxi.locs[passenger])})" if passenger < 4 else "in the taxi"
    target = f"{_STANDS[goal]} ({_at(*taxi.locs[goal])})"
    return f"The taxi is at {_at(row, column)}. The passenger is {where} and wants to go to {target}."


_RENDERERS = {
    "FrozenLake": TextRenderer(
        "You are on a frozen lake, at P. Walk over the ice (S, F) to the goal (G), and not into a hole (H).",
        (("left", "west"), ("down", "south"), ("right", "east"), ("up", "north")),
        _lake_map,
        _lake_state,
    ),
    "CliffWalking": TextRenderer(
        "You are at P. Walk to the goal (G). Who steps off the cliff (C) is back at the start.",
        (("up", "north"), ("right", "east"), ("down", "south"), ("left", "west")),
        _cliff_map,
        lambda env: f"You are at {_at(*divmod(int(env.unwrapped.s), env.unwrapped.shape[1]))}.",
    ),
    "Taxi": TextRenderer(
        "You drive a taxi (T). Go to the passenger, pick them up, and drop them off where they want to go. Stands are "
        "R(ed), G(reen), Y(ellow) and B(lue); you can pass : and not |.",
        (
            ("south", "down"),
            ("north", "up"),
            ("east", "right"),
            ("west", "left"),
            ("pickup", "pick up", "pick-up"),
            ("dropoff", "drop off", "drop-off"),
        ),
        _taxi_map,
        _taxi_state,
    ),
}
"""By what their ids begin with."""
