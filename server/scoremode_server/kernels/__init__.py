"""Kernels, in PyTorch and Triton, that compute prompt logprobs from hidden states and logits, and their working memory.
They import nothing of vLLM."""
