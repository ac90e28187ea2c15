"""The class for vLLM's `--worker-extension-cls`: methods of engine workers that API servers call with
`collective_rpc`."""

from typing import Any, cast

from vllm.distributed import get_pp_group, get_tp_group

from scoremode_server.references.files.manifest import HeadFormat
from scoremode_server.references.worker.heads import describe_head, gather_weight
from scoremode_server.references.worker.orders import SINK
from scoremode_server.references.worker.sinks import WorkerWindows
from scoremode_server.worker.lm_head import LogitsSource, examine


class ReferenceWorker:
    """Methods of every worker. Their arguments and results are built-in types, which vLLM's calls of workers can send.
    `describe` methods return as text why something cannot be done, and `scoremode_exchange` reports failed reads and
    writes, because vLLM reduces an exception to one line that names neither its type nor the worker."""

    model_runner: Any
    execute_dummy_batch: Any

    def scoremode_describe_head(self) -> dict[str, Any] | str:
        """The served model's LM head (`HeadFormat`), or why references cannot keep it."""
        try:
            return self._scoremode_head()[1].model_dump()
        except ValueError as error:
            return str(error)

    def scoremode_describe_layers(self) -> dict[str, Any] | str:
        """The served model's decoder layers (`ReferenceLayers`), or why their residual stream cannot be cut."""
        windows = self._scoremode_windows()
        if windows.layers is None:
            # Layers are found in the first forward pass. On a CPU vLLM has run none, because it does not profile there.
            self.execute_dummy_batch()
        described = "no forward pass was seen" if windows.layers is None else windows.layers.described
        return described if isinstance(described, str) else described.model_dump()

    def scoremode_describe_routes(self) -> dict[str, Any] | str:
        """The served model's mixture-of-experts layers (`ReferenceRoutes`), or why their experts cannot be recorded."""
        described = self._scoremode_windows().expert_layers(self.model_runner.model).described
        return described if isinstance(described, str) else described.model_dump()

    def scoremode_write_head(self, name: str, identity: str, ticket: str) -> None:
        """Begin to write the served model's LM head into a reference. `scoremode_exchange` returns the ticket's
        outcome."""
        if not get_pp_group().is_last_rank:
            return
        group, (source, head) = get_tp_group(), self._scoremode_head()
        parts = [part.data for part in (source.lm_head.weight, source.bias) if part is not None]
        weights = [gather_weight(part, head.vocab_size, group) for part in parts]
        if group.rank_in_group == 0:
            self._scoremode_windows().write_head_later(name, identity, ticket, weights)

    def scoremode_exchange(self, messages: dict[int, tuple[Any, ...]]) -> dict[str, Any] | None:
        """Answer an API server's message to this engine: see `WorkerWindows.exchange`. `messages` has one message per
        data-parallel index. Returns None on a rank without an LM head, or if there is no message for this engine."""
        runner = self.model_runner
        index = runner.vllm_config.parallel_config.data_parallel_index
        if not get_pp_group().is_last_rank or index not in messages:
            return None
        windows = self._scoremode_windows()
        windows.allocate(runner.vllm_config, runner.device)
        return windows.exchange(*messages[index])

    def _scoremode_head(self) -> tuple[LogitsSource, HeadFormat]:
        config = self.model_runner.model_config
        hidden_size, dtype = config.get_hidden_size(), config.dtype
        if not get_pp_group().is_last_rank:
            raise ValueError("this rank has no LM head")
        source = examine(self.model_runner.model.compute_logits, hidden_size, dtype, get_tp_group()).source
        if source is None:
            raise ValueError(
                "its logits are not one projection of its hidden states that vLLM's LogitsProcessor scales and caps"
            )
        return source, describe_head(source, hidden_size, dtype)

    def _scoremode_windows(self) -> WorkerWindows:
        return cast(WorkerWindows, type(self.model_runner)._scoremode_sinks[SINK])
