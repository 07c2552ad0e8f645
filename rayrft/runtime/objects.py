"""Objects in Ray's object store, which may be full for a while."""

from __future__ import annotations

from typing import Any

from rayrft.errors import NoRoom
from rayrft.files import held
from rayrft.runtime.handle import death_reason
from rayrft.runtime.ray_api import ray


@held
def put_object(value: Any) -> Any:
    """Put an object in the object store; return its reference. Blocks while the store is full, and then raises NoRoom:
    see `held`."""
    try:
        return ray.put(value)
    except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
        raise NoRoom(death_reason(error), field="object store") from None
