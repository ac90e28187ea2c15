"""The identity of a served model, which references keep."""

from pydantic import ConfigDict

from scoremode.wire.protocol import ServedModel


class ModelIdentity(ServedModel):
    """A model as a server serves it, such as the one that a reference was recorded of."""

    model_config = ConfigDict(frozen=True)

    fingerprint: str
    tokenizer_fingerprint: str

    def may_continue(self, recorded: "ModelIdentity") -> bool:
        """Whether fingerprint and commit are those of the model that a reference was recorded of."""
        commits = {self.revision, recorded.revision} - {None}
        return recorded.fingerprint == self.fingerprint and len(commits) < 2
