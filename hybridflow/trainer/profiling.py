"""Profiles of single steps (`trainer.profile`)."""

from __future__ import annotations

from collections.abc import Callable

from hybridflow.trainer.protocols import Policy
from hybridflow.trainer.session import Session


class StepProfiles:
    """Profiles steps on the policy's ranks.

    Args:
        policy: the policy whose ranks (`trainer.profile.ranks`) are profiled.
        session: traces are written to `profile/` in its run folder.
        say: called with a message for each profile that could not be written.
    """

    def __init__(self, policy: Policy, session: Session, say: Callable[[str], None]) -> None:
        self._policy = policy
        self._session = session
        self._say = say

    async def begin(self) -> None:
        """Start profiling."""
        await self._policy.start_profile()

    async def end(self, step: int) -> None:
        """Write the profiles of this step."""
        folder = self._session.folder / "profile" / f"step_{step:06d}"
        with self._session.timeline.phase("profile"):
            reasons = await self._policy.stop_profile(folder)
        for reason in reasons:
            self._say(f"step {step}: {reason}")
