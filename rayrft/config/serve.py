"""Config of HTTP services: the endpoint, the feedback page, and rewards."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import Field

from rayrft.config.base import LocalPath, Name, Section, invalid, section_rule
from rayrft.config.placement import WaitConfig
from rayrft.config.reward import RewardModelsConfig
from rayrft.errors import ConfigError
from rayrft.files import read_text
from rayrft.runtime.serving import HAPROXY_HOSTS, LOCAL, HttpSettings, key_digest

EDITED = "human"
"""Default name of the demonstrations that people's edits become."""


History = Literal["sampled", "template"]


class HttpConfig(HttpSettings, Section):
    """Address, keys and limits of an HTTP service."""

    keys_file: LocalPath | None = None
    """A file with one API key per line."""
    keys_env: str | None = None
    """The environment variable of the driver with API keys, separated by commas."""

    @section_rule
    def _keys(self) -> None:
        problem = "is reachable from other machines, and no key is required"
        if self.keys_file is None and self.keys_env is None and self.host not in LOCAL:
            raise invalid("host", problem, "give keys_file or keys_env, or use 127.0.0.1", value=self.host)
        if self.proxy == "haproxy" and self.host not in HAPROXY_HOSTS:
            raise invalid("proxy", f"needs a host among {', '.join(HAPROXY_HOSTS)}", "use ray", value=self.proxy)


def read_keys(config: HttpConfig) -> tuple[str, ...]:
    """Return the digests of a service's API keys. Raises ConfigError if they cannot be read, or there are none."""
    keys = os.environ.get(config.keys_env or "", "").split(",")
    field, place, problem = "serve.keys_env", config.keys_env, "contains no key"
    if config.keys_file is not None:
        field, place = "serve.keys_file", str(config.keys_file)
        keys += read_text(config.keys_file, field).splitlines()
    keys = [key.strip() for key in keys if key.strip()]
    if not keys and place is not None:
        raise ConfigError(problem, "put the API keys there", field=field, value=place)
    return tuple(map(key_digest, keys))


class ServeConfig(HttpConfig):
    """The OpenAI-compatible endpoint: its requests, and how their sessions become groups."""

    model_name: str | None = None
    """The model's name in requests; by default the run's name."""
    tool_calls: str = "auto"
    """The format of the model's tool calls: hermes (JSON between ``<tool_call>`` and ``</tool_call>``), json (bare),
    harmony (gpt-oss), one of vLLM's tool parsers, or auto: the one that reads what the chat template shows."""
    reasoning: Literal["split", "keep"] = "split"
    """Whether reasoning is ``reasoning_content`` of a chat message, or stays in its content."""
    history: History = "sampled"
    """Earlier answers in later calls of a session. ``sampled``: with their reasoning, so that the session is one row.
    ``template``: as the chat template shows them; a call for which it leaves reasoning out begins another row."""
    off_policy: Literal["untrained", "refuse", "ignore"] = "untrained"
    """Policy for requests with another temperature, top_p or top_k than the run's. ``untrained``: answered as
    requested, and masked in training. ``refuse``: status 400. ``ignore``: answered with the run's values."""
    record: bool = True
    """Whether sessions become groups to train on."""
    group_by: Literal["prompt", "any"] = "prompt"
    """Sessions that make a group if they name no task: those with the same first request, or any."""
    reward_s: float = Field(600.0, gt=0)
    """Seconds after the last call of a session in which its reward must come."""
    default_reward: float | None = None
    """The reward of a session without one in time; by default the session is dropped and counted."""
    group_s: float = Field(3600.0, gt=0)
    """Seconds that a session with a reward waits until its group is complete."""
    keep_days: float | None = Field(None, gt=0)
    """Days after which a running run erases rows of sessions from its log (``rayrft data forget``: of an ended one)."""
    max_sessions: int = Field(10_000, ge=1)
    """Most sessions that wait for their reward, and for their group; beyond it the oldest is dropped and counted."""


class JudgementConfig(Section):
    """What a run does for the people who judge its answers on the feedback page."""

    hold_steps: int = Field(0, ge=0)
    """Steps, at most ``max_staleness``, for which a group waits in the Buffer before it is trained, so that judgements
    arrive in time. The first step waits until this many further batches are sampled."""


class FeedbackConfig(HttpConfig):
    """The page on which people judge a run's answers: the options of `rayrft serve feedback`. Without keys_file and
    keys_env a key is generated at each start, and written to a file in the run's folder."""

    replicas: int = Field(1, ge=1, le=1)
    """One, because it records which person has which item."""
    rule: Literal["random", "uncertain", "low_deviation", "disagreement"] = "random"
    """Order of items, after rows that wait for training. It is random, or the first are answers with the lowest mean
    log-prob of a token, groups with the most equal rewards, or answers on which reward parts, reward and people differ
    most."""
    agreement: int = Field(1, ge=1)
    """People who see each item."""
    lease_s: float = Field(300.0, gt=0)
    """Seconds without activity of a person after which their item is given to another one."""
    levels: int = Field(5, ge=2, le=9)
    """The highest score; the lowest is 1."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """Rewards of the lowest and highest score, thumbs down and up, and the last and first of a ranked group; those in
    between are evenly spaced. Rewards by several people are averaged."""
    set_rewards: bool = True
    """Whether people's rewards replace those of the rows; otherwise they are labels only."""
    labels: list[str] = Field(default_factory=list, max_length=9)
    """Labels to choose from."""
    demonstrations: Name = EDITED
    """The run's demonstrations to which edited answers are added. A stage that names ``human`` may start without."""
    max_groups: int = Field(2000, ge=1)
    """Most groups in the queue: groups that wait for training first, then the newest."""


class ViewerConfig(HttpConfig):
    """The viewer: the options of `rayrft view`. Without keys_file and keys_env a key is generated at each start."""

    port: int = Field(8100, ge=1, le=65535)
    """Of ``rayrft view``, which is a process of its own; on Ray Serve it is 8000."""
    replicas: int = Field(1, ge=1, le=1)
    """One, because it holds the tables of rows and the journals of feedback pages."""


class RewardServiceConfig(Section):
    """Rewards served over HTTP, without a run: the file of `rayrft serve rewards`."""

    name: Name = "rewards"
    """The service is at ``/<name>``."""
    reward: RewardModelsConfig
    """As in a run, without the keys on training."""
    serve: HttpConfig = HttpConfig()
    placement: WaitConfig = WaitConfig()
    plugins: list[LocalPath] = Field(default_factory=list)
    """Python files that register your own rewards, at paths that every node can read."""
