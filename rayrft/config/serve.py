"""Config of what is served over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from rayrft.config.base import NAME, Section, invalid
from rayrft.config.reward import RewardModelsConfig
from rayrft.runtime.serving import LOCAL

EDITED = "human"
"""The demonstrations that people's edits become, unless told otherwise."""


class HttpConfig(Section):
    """What is served over HTTP: where, to whom, and within which limits."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=1, le=65535)
    """Ray Serve has one HTTP port in a cluster: what is served on the same cluster shares it, each under
    ``/<its name>``."""
    keys_file: Path | None = None
    """A file with one API key per line."""
    keys_env: str | None = None
    """The environment variable with API keys, separated by commas, of the process that starts the run."""
    replicas: int = Field(1, ge=1)
    """Processes that answer HTTP requests."""
    cpus: float = Field(0.1, ge=0)
    """CPUs of one replica."""
    max_requests: int = Field(1024, ge=1)
    """Requests that a replica has open at a time; further ones for an answer get status 429."""
    max_body_kib: int = Field(4096, ge=1)
    """Largest request body; a larger one gets status 413."""
    body_s: float = Field(60.0, gt=0)
    """Seconds in which the body of a request must arrive, after which it gets status 408."""
    deadline_s: float = Field(600.0, gt=0)
    """Seconds that a request may take, after which it gets status 504."""

    @field_validator("keys_file")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        return path.expanduser().absolute() if path else None

    @model_validator(mode="after")
    def _keys(self) -> Self:
        if self.host not in LOCAL and self.keys_file is None and self.keys_env is None:
            raise invalid(
                "host",
                "can be reached from other machines, and requests would be answered without a key",
                value=self.host,
                remedy="give keys_file or keys_env",
            )
        return self


class ServeConfig(HttpConfig):
    """The OpenAI-compatible endpoint: which requests it takes, and how their sessions become groups."""

    model_name: str | None = None
    """What requests call the model; by default the run's name."""
    tool_calls: Literal["hermes", "json"] = "hermes"
    """The form in which the model writes calls of tools: JSON between ``<tool_call>`` and ``</tool_call>``, or bare."""
    off_policy: Literal["untrained", "refuse", "ignore"] = "untrained"
    """Requests with a temperature, top_p or top_k other than the run's, whose answers are of another distribution than
    the policy's. ``untrained``: answered as asked, and masked in training. ``refuse``: status 400. ``ignore``: answered
    as the run samples."""
    record: bool = True
    """Whether sessions become groups to train on."""
    group_by: Literal["prompt", "any"] = "prompt"
    """Which sessions make a group if they name no task: those that begin with the same request, or any."""
    reward_s: float = Field(600.0, gt=0)
    """Seconds after the last call of a session in which its reward must come."""
    default_reward: float | None = None
    """The reward of a session that got none in time; by default it is dropped and counted."""
    group_s: float = Field(3600.0, gt=0)
    """Seconds that a session with a reward waits until its group is complete."""
    keep_days: float | None = Field(None, gt=0)
    """Days after which the rows of sessions are erased from the run's log while it is running, trained or not; for an
    ended run see ``rayrft data forget``."""
    max_sessions: int = Field(10_000, ge=1)
    """Sessions that wait for their reward, and likewise for their group; beyond it the one that has waited for longest
    is dropped and counted."""


class FeedbackConfig(HttpConfig):
    """The page on which people say what they think of a run's answers: the options of `rayrft serve feedback`.

    Without keys_file and keys_env a key is made at each start, and written to a file in the run's folder.
    """

    replicas: int = Field(1, ge=1, le=1)
    """One, which knows who looks at what."""
    rule: Literal["random", "uncertain", "low_deviation", "disagreement"] = "random"
    """What is shown first: any; answers with the lowest mean log-prob of a token; groups whose rewards differ least;
    answers of whose value the parts of the reward, the reward and people differ most. Rows that wait for training come
    before all others."""
    agreement: int = Field(1, ge=1)
    """People who see each item."""
    lease_s: float = Field(300.0, gt=0)
    """Seconds after which an item is given to somebody else if nothing was heard of the person who has it."""
    levels: int = Field(5, ge=2, le=9)
    """Scores are 1 to this."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """Rewards of the lowest and of the highest score, of thumbs down and up, and of the last and the first of a ranked
    group; those between are spaced evenly. Those of several people are averaged."""
    set_rewards: bool = True
    """Whether people's rewards replace those of the rows; if not, they are labels only."""
    labels: list[str] = Field(default_factory=list, max_length=9)
    """Labels to choose from."""
    demonstrations: str = Field(EDITED, pattern=NAME)
    """The demonstrations of the run to which edited answers are added. A stage with groups that names ``human`` may
    begin while there are none."""
    max_groups: int = Field(2000, ge=1)
    """Groups in the queue, those that wait for training first, then the newest."""


class RewardServiceConfig(Section):
    """Rewards that are served over HTTP, without a run: the file of `rayrft serve rewards`."""

    name: str = Field("rewards", pattern=NAME)
    """The service is at ``/<name>``."""
    reward: RewardModelsConfig
    """As in a run, without what concerns training."""
    serve: HttpConfig = HttpConfig()
    plugins: list[Path] = Field(default_factory=list)
    """Python files that register your own rewards, at paths that every node can read."""

    @field_validator("plugins")
    @classmethod
    def _absolute(cls, paths: list[Path]) -> list[Path]:
        return [path.expanduser().absolute() for path in paths]
