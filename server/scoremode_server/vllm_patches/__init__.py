"""Everything that depends on vLLM's private parts; `private.toml` is the record of which these are. `versions` decides
whether the installed vLLM is one that Scoremode runs on, and `install` puts the patches in place.

Everything above may import from here; nothing here imports it. `scripts/check_vllm.py` imports `versions`, which needs
no vLLM.
"""
