"""Identifies a served model. References, which are recordings of a model's distributions, store this."""

from pydantic import ConfigDict

from scoremode.wire.protocol import ServedModel


class ModelIdentity(ServedModel):
    """A model as a server serves it, such as the one that recorded a reference."""

    model_config = ConfigDict(frozen=True)

    fingerprint: str
    tokenizer_fingerprint: str

    def may_continue(self, recorded: "ModelIdentity") -> bool:
        """Whether this model may continue a recording by `recorded`: fingerprints are equal, and so are commits if both
        are known."""
        commits = {self.revision, recorded.revision} - {None}
        return recorded.fingerprint == self.fingerprint and len(commits) < 2
