"""Which replicas may run a request: those with its revision's weights, and an engine build that fits.

A build is what exactly computes: a replica's fingerprint. A base model's name says little: replicas of other
weights may go by it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BuildRule:
    """Of one revision.

    Attributes:
        only: no other fingerprint; None: any build of the base.
        never: that of a rollout which is under way, for requests of its stable side: an answer by the build
            that is being tried would be compared with itself.
        rather_not: of rollouts under way and of those that were given up: only while nothing else is ready.
        base_revision: of the weights ("sha256:..."); None: whichever.
        tokenizer_sha256: None: whichever.
    """

    only: str | None = None
    never: str | None = None
    rather_not: tuple[str, ...] = ()
    base_revision: str | None = None
    tokenizer_sha256: str | None = None

    def allows(self, fingerprint: str) -> bool:
        """Whether that build may run it."""
        return fingerprint != self.never and self.only in (None, fingerprint)

    def is_of(self, base_revision: str, tokenizer_sha256: str) -> bool:
        """Whether these weights are the revision's; empty: of a release that does not say, which is believed."""
        return self.base_revision in (None, base_revision or self.base_revision) and (
            self.tokenizer_sha256 in (None, tokenizer_sha256 or self.tokenizer_sha256)
        )

    def unavailable(self, base_model: str, *, are_others_ready: bool = False) -> str:
        """Why nothing is there that may run it, in words.

        Args:
            are_others_ready: there are replicas of that name, but of other weights or another tokenizer.
        """
        which = f"No engine for {base_model}"
        if self.only is not None:
            which = f"No engine of the build {self.only} for {base_model}"
        elif self.never is not None:
            which += f" but of the build {self.never}, which is being rolled out,"
        if are_others_ready:
            return (
                f"{which} with the weights {self.base_revision} and the tokenizer {self.tokenizer_sha256} is ready: "
                "those that are ready serve others under that name. Start one with these weights, or roll the "
                "deployment out to the other ones' engine build."
            )
        return f"{which} is ready; try again in a few seconds."


ANY_BUILD = BuildRule()
