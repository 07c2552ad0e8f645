"""Router of prompts to the engine with the fewest outstanding answers."""

from __future__ import annotations

from collections.abc import Sequence

from rayrft.errors import ActorDied, RayrftError
from rayrft.explorer.engine import Completion, RolloutEngine, Sampling
from rayrft.handle import Handle


class Router:
    """Spreads prompts over engine actors. The n answers to one prompt are one request, so they share its prefix."""

    def __init__(self, engines: Sequence[Handle[RolloutEngine]]) -> None:
        self._engines = engines
        self._outstanding = [0] * len(engines)

    async def generate(
        self, prompt: list[int], n: int, sampling: Sampling, images: tuple[str, ...] = ()
    ) -> list[Completion]:
        """Sample ``n`` answers on one engine.

        Raises ActorDied, naming the engine, if it or its core has died, RequestRefused, and DataError for images that
        cannot be read.
        """
        from ray.exceptions import RayActorError, RayTaskError

        index = min(range(len(self._engines)), key=self._outstanding.__getitem__)
        self._outstanding[index] += n
        try:
            return await self._engines[index].call(RolloutEngine.generate, prompt, n, sampling, images)
        except (RayActorError, RayTaskError) as error:
            cause = getattr(error, "cause", None) or error
            if isinstance(cause, RayrftError):  # such as a request that is too long: the engine is alive
                raise cause from None
            raise ActorDied(
                f"the engine failed to answer: {type(cause).__name__}: {str(cause).strip().splitlines()[0]}",
                field=f"engine-{index}",
                remedy="see the engine's log in the Ray dashboard",
            ) from None
        finally:
            self._outstanding[index] -= n
