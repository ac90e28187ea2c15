"""The identity of a served model, which references keep."""

from pydantic import BaseModel, ConfigDict

from scoremode.wire.protocol import ComputedBy


class ModelIdentity(BaseModel):
    """A model as a server serves it, such as the one that a reference was recorded of."""

    model_config = ConfigDict(frozen=True)

    model: str
    revision: str | None
    dtype: str
    quantization: str | None
    scoremode_version: str
    vllm_version: str
    fingerprint: str
    tokenizer_fingerprint: str
    computed_by: ComputedBy | None = None
    stored_dtype: str | None = None
    """Of the checkpoint; this and the next two are as in `ServerInfo`, and None in references of older servers."""
    weight_bytes: int | None = None
    num_parameters: int | None = None

    def may_continue(self, recorded: "ModelIdentity") -> bool:
        """Whether fingerprint and commit are those of the model that a reference was recorded of."""
        commits = {self.revision, recorded.revision} - {None}
        return recorded.fingerprint == self.fingerprint and len(commits) < 2
