"""Rows of prompt logprobs that the V1 model runner never computed, made recognizable.

It collects the rows of a prompt in uninitialized memory. A request that was preempted in its prefill may go on behind
blocks that another request has computed meanwhile, while `num_cached_tokens` still tells of its first start: the rows
between are whatever memory held. With NaN to begin with, they are known. The V2 runner leaves such rows out.
"""

import math

from vllm.v1.outputs import LogprobsTensors


def install() -> None:
    """Patch vLLM in this process; once is enough, and more does no harm."""
    if getattr(LogprobsTensors, "_scoremode_patched", False):
        return
    make = LogprobsTensors.empty_cpu

    def empty_cpu(num_positions: int, num_tokens_per_position: int) -> LogprobsTensors:
        tensors = make(num_positions, num_tokens_per_position)
        tensors.logprobs.fill_(math.nan)
        return tensors

    LogprobsTensors.empty_cpu = staticmethod(empty_cpu)
    LogprobsTensors._scoremode_patched = True
