"""Errors that name the field, its value and the remedy.

Every problem that a user can fix is raised as a :class:`RayrftError`, as early as possible; the command line prints it
without a traceback and exits non-zero.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import partial
from typing import Any


class RayrftError(Exception):
    """A problem that the user can fix. ``field`` is a config key, a file or an actor; ``value`` is its value;
    ``remedy`` is the action to take."""

    def __init__(self, problem: str, remedy: str = "", *, field: str = "", value: Any = None) -> None:
        super().__init__(problem, remedy, field, value)
        self.problem, self.field, self.value, self.remedy = problem, field, value, remedy

    def __str__(self) -> str:
        where = f"{self.field}: " if self.field else ""
        shown = repr(self.value)
        found = f" (found {shown if len(shown) <= 300 else f'{shown[:300]}…'})" if self.value is not None else ""
        fix = f". {self.remedy[0].upper()}{self.remedy[1:].rstrip(chr(46))}" if self.remedy else ""
        text = f"{where}{self.problem.rstrip('.')}{found}{fix}"
        return text if text.endswith(("?", ".")) else text + "."

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray pickles exceptions, and default pickling does not keep keyword arguments.
        return partial(type(self), field=self.field, value=self.value), (self.problem, self.remedy)


class ConfigError(RayrftError):
    """The configuration is invalid or inconsistent."""


class RunFinished(ConfigError):
    """There is nothing left to do for the run."""


class DataError(RayrftError):
    """A task set or a demonstration file is missing, empty or broken."""


class ModelError(RayrftError):
    """The model or its tokenizer cannot be used."""


class PlacementError(RayrftError):
    """The run does not fit on the cluster, or its name is in use."""


class ClusterError(RayrftError):
    """No usable Ray cluster: none answers, it rejects this process, or its token cannot be written."""


class WeightSyncError(RayrftError):
    """An engine did not receive the weights that the trainer sent."""


class ActorDied(RayrftError):
    """An actor of the run died; ``field`` names it, ``value`` holds the cause."""


class RequestRefused(RayrftError):
    """An engine does not take a request, such as one that is too long; the engine stays healthy."""


class ActorUnreachable(RayrftError):
    """An actor cannot be reached for the moment, or does not answer in time; it may be alive."""


class EndpointFailed(RayrftError):
    """An endpoint did not answer a request, or gave an invalid response; ``value`` is its URL."""


class EngineFailed(EndpointFailed):
    """An engine did not answer one request; the engine may be well, and other requests are answered."""


class CallFailed(RayrftError):
    """A call to an object in a process of its own failed; the object raised, or one of the errors below."""


class ProcessDied(CallFailed):
    """The process ended; ``value`` is how."""


class CallTimeout(CallFailed):
    """The deadline has passed, and the process was killed."""


class OperatorFailed(RayrftError):
    """An operator of a pipeline raised, ended its process, or returned what does not fit; ``field`` names it."""


class OperatorTimeout(OperatorFailed):
    """An operator was not done with a batch within its deadline, and its process was killed."""


class AnswerTooLarge(CallFailed):
    """The answer exceeds the limit, and the process was killed; ``value`` is its size in bytes."""


class SandboxFailed(RayrftError):
    """A sandbox could not start a program or was ended from outside; it says nothing about the program."""


class EnvironmentFailed(RayrftError):
    """The environment of one attempt failed, or what it returned is not valid."""


class EnvironmentTimeout(EnvironmentFailed):
    """The environment did not answer within its deadline."""


class StorageError(RayrftError):
    """The Buffer's log cannot be written or read; ``field`` names the file. Earlier data stays readable."""


class NoLocks(StorageError):
    """The file system has no file locks."""


class NoRoom(StorageError):
    """The same because a disk is full or read-only: the write succeeds once there is room."""


class Stalled(RayrftError):
    """A wait had no progress for ``monitor.stall_s``; ``field`` names who was waited for, ``value`` what for."""


class LeaseEnded(RayrftError):
    """No batch can be leased; ``value``: ``deadline``, ``end_of_data``, ``stage_closed`` or ``resumed``."""


class RowsFailed(RayrftError):
    """A training step failed on some rows; ``value`` has their experience ids, ``field`` names the rank."""


class NotFinite(RayrftError):
    """The loss or gradient of a training step is not finite; ``value`` has both, and the step of the stage."""


class DeviceFailed(RayrftError):
    """A device of the trainer failed; ``field`` names the rank, ``value`` node and device."""


class OutOfMemory(DeviceFailed):
    """A rank of the trainer ran out of the memory of its device or node."""


class GuardTripped(RayrftError):
    """A guard of the config has ended the run; ``value`` is the metric at the latest step."""


class NotReproduced(RayrftError):
    """A figure of a recipe is outside its band."""


class FeedbackRefused(RayrftError):
    """Feedback came too late; ``value`` is the version whose weights were trained on the row."""


class RunNotFound(RayrftError):
    """No run of this name is running on the cluster."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``did you mean 'x'`` for the closest known name, else the list of all known names."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
