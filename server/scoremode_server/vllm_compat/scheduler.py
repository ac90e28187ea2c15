"""Patches vLLM's scheduler for lanes: a request gets at most as many tokens per step as its `RowSpec` says.

vLLM chooses kernels by the numbers of sequences and tokens in a step, so a text that is fed one token per step is
computed by the kernels that generate. docs/architecture.md lists what else vLLM's runners and backends look at.
"""

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.scheduler import Scheduler

from scoremode_server.worker.row_spec import ROWS


def patch() -> None:
    """Patch the method that vLLM calls last to adjust how many tokens of a request a step has."""
    reserve = Scheduler._reserve_prefill_lookahead

    def reserve_within_lane(self: Any, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        return within_lane(request, num_computed_tokens, reserve(self, request, num_computed_tokens, num_new_tokens))

    Scheduler._reserve_prefill_lookahead = reserve_within_lane


def within_lane(request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
    """Limit a request's `num_new_tokens` in a step: to the rest of the tokens that its lane prefills, and after those
    to one chunk."""
    params = request.sampling_params
    spec = ((params and params.extra_args) or {}).get(ROWS)
    # Tokens after the prompt are drafts, all of which vLLM needs.
    if not spec or not spec["chunk"] or num_computed_tokens + num_new_tokens > request.num_prompt_tokens:
        return num_new_tokens
    most: int = max(spec["context"] - num_computed_tokens, spec["chunk"])
    return min(num_new_tokens, most)


def has_lanes(config: VllmConfig) -> bool:
    """Whether an engine can serve lanes. Its scheduler must be patched and give all ranks the same tokens, and its
    model must begin a text in a step of one token as in a longer one."""
    model = config.model_config
    # This model's linear attention treats a step of one token as a decode, and resumes from the old state in the
    # request's slot.
    if model.architecture == "BailingMoeV2_5ForCausalLM":
        return False
    # V1 replays a full graph for a step of one token, with the state slots of an earlier step.
    has_full_graphs = config.compilation_config.cudagraph_mode.has_full_cudagraphs()
    if model.has_inner_state and has_full_graphs and not config.use_v2_model_runner:
        return False
    reserves = getattr(config.scheduler_config.get_scheduler_cls(), "_reserve_prefill_lookahead", None)
    is_patched = reserves is Scheduler._reserve_prefill_lookahead
    return is_patched and config.parallel_config.prefill_context_parallel_size == 1
