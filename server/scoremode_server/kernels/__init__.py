"""Prompt logprobs from hidden states and logits: torch and Triton on tensors, and the working memory that they take.

Nothing here imports vLLM. `vllm_patches` imports from here.
"""
